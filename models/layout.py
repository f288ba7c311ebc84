"""The order in which a step's rows are computed, and where everything of theirs lies. Host arithmetic; no tensors.

Rows are ordered decodes first, then by adapter, so that the tokens of an adapter are neighbours.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from loray.models.lora_groups import Run, sort_key
from loray.models.slots import Slots
from loray.models.step import Row

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Layout:
    """The rows in the order of the batch; `order` has their places in the step."""

    order: Ints  # [rows]
    slots: Ints  # [rows]
    num_tokens: Ints  # [rows]
    starts: Ints  # [rows] tokens computed before
    samples: NDArray[np.bool_]  # [rows] whether the row's last token yields a new one
    runs: list[tuple[Run, ...]]  # [rows] ranks of its adapter in the LoRA pool
    kv_slots: Ints  # [num_tokens] where each token's key and value go: block id * block size + offset

    @cached_property
    def offsets(self) -> Ints:
        """[rows] place in the batch of each row's first token."""
        return np.cumsum(self.num_tokens) - self.num_tokens

    @cached_property
    def positions(self) -> Ints:
        """[num_tokens] in their sequences."""
        return np.arange(self.num_tokens.sum()) + np.repeat(self.starts - self.offsets, self.num_tokens)

    @property
    def token_slots(self) -> Ints:
        """[num_tokens]"""
        return np.repeat(self.slots, self.num_tokens)

    @property
    def context_lens(self) -> Ints:
        """[rows] keys that the row's last token sees, its own included."""
        return self.starts + self.num_tokens

    @property
    def is_decode(self) -> bool:
        """One token a row, and one from it."""
        return bool((self.num_tokens == 1).all() and self.samples.all())

    @property
    def num_scores(self) -> int:
        """Pairs of a query and a key."""
        return int(self.positions.sum()) + len(self.positions)

    @property
    def sample_tokens(self) -> Ints:
        """[num_samples] places in the batch."""
        return (self.offsets + self.num_tokens - 1)[self.samples]

    @property
    def sample_slots(self) -> Ints:
        """[num_samples] in the order of the logits."""
        return self.slots[self.samples]

    @property
    def sample_positions(self) -> Ints:
        """[num_samples] of the tokens to be sampled."""
        return self.context_lens[self.samples]

    @property
    def result_order(self) -> list[int]:
        """[num_samples] row of the logits of each sampling row of the step."""
        return np.argsort(self.order[self.samples]).tolist()

    @property
    def first_tokens(self) -> Ints:
        """[rows] place in the batch of the first token of each row of the step."""
        first_tokens = np.empty_like(self.offsets)
        first_tokens[self.order] = self.offsets
        return first_tokens


def lay_out(rows: list[Row], slots: Slots, block_size: int) -> Layout:
    def key(index: int) -> tuple[bool, int, int]:
        row = rows[index]
        return row.num_tokens > 1, sort_key(slots.runs[row.slot]), row.slot

    order = sorted(range(len(rows)), key=key)
    ordered = [rows[i] for i in order]
    row_slots = np.array([row.slot for row in ordered], np.int64)
    layout = Layout(
        order=np.array(order, np.int64),
        slots=row_slots,
        num_tokens=np.array([row.num_tokens for row in ordered], np.int64),
        starts=slots.num_computed[row_slots],
        samples=np.array([row.samples for row in ordered], bool),
        runs=[slots.runs[row.slot] for row in ordered],
        kv_slots=np.empty(sum(row.num_tokens for row in ordered), np.int64),
    )
    blocks = slots.block_table[layout.token_slots, layout.positions // block_size]
    layout.kv_slots[:] = blocks * block_size + layout.positions % block_size
    return layout
