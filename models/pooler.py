"""Makes embeddings: gathers the final hidden states of sequences that pool, chunk by chunk. Runs no model and no head."""

from dataclasses import dataclass

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from loray.models.step import Admission, Pooling, Row
from loray.models.to_host import ToHost


@dataclass(slots=True)
class _Pool:
    """One sequence's embedding so far."""

    pooling: Pooling
    num_tokens: int  # of the whole sequence
    total: Tensor | None = None  # [hidden] float32, the sum over the chunks before this one


class Pooler:
    def __init__(self) -> None:
        self._pools: dict[int, _Pool] = {}  # by slot

    def admit(self, admission: Admission) -> None:
        self._pools.pop(admission.slot, None)
        if admission.pooling:
            assert admission.num_computed == 0, "an embedding needs the hidden states of all its tokens"
            self._pools[admission.slot] = _Pool(admission.pooling, len(admission.token_ids))

    def __contains__(self, slot: int) -> bool:
        return slot in self._pools

    def without_samples(self, rows: list[Row]) -> list[Row]:
        """The rows as the head needs them: one that pools yields no token."""
        if not self._pools:
            return rows
        return [msgspec.structs.replace(row, samples=False) if row.slot in self._pools else row for row in rows]

    def pool(self, rows: list[Row], first_tokens: NDArray[np.int64], hidden: Tensor) -> ToHost:
        """The embeddings that are whole now, [hidden] each, in the order of the rows.

        first_tokens: of each row, in hidden [num_tokens, hidden]."""
        finished = []
        for row, first in zip(rows, first_tokens.tolist(), strict=True):
            pool = self._pools.get(row.slot)
            if pool is None:
                continue
            chunk = hidden[first : first + row.num_tokens]
            if pool.pooling == "mean":
                total = chunk.sum(0, dtype=torch.float32)
                pool.total = total if pool.total is None else pool.total + total
            if row.samples:
                # It is read late, when others' hidden states are where these were.
                finished.append(chunk[-1].to(torch.float32, copy=True) if pool.total is None else pool.total / pool.num_tokens)
                del self._pools[row.slot]
        return ToHost(*finished)
