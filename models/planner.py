"""Turns a step's rows into a Batch: order, positions, KV slots, attention groups, LoRA groups. Host arithmetic, then uploads.

Rows are ordered decodes first, then by adapter, so that the tokens of an adapter are neighbours.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from loray.models.batch import AttentionGroup, Batch, Mask
from loray.models.lora_groups import lora_work, sort_key, special_rows
from loray.models.slots import Slots
from loray.models.special import Special
from loray.models.step import Row

Ints = NDArray[np.int64]
SMALLEST_CONTEXT = 256  # shorter contexts share a group: another call costs more than their padding
SMALLEST_QUERY = 16


@dataclass(frozen=True, slots=True)
class Plan:
    batch: Batch
    sample_slots: Ints  # [num_samples] in the order of the logits
    sample_positions: Ints  # [num_samples] of the tokens to be sampled
    result_order: Ints  # [num_samples] logits row of each sampling row of the step
    first_tokens: Ints  # [rows of the step] place in the batch of each row's first token


class Planner:
    def __init__(
        self,
        slots: Slots,
        tokens: Tensor,
        block_size: int,
        dtype: torch.dtype,
        windows: frozenset[int],
        specials: Mapping[int, Special],
    ) -> None:
        self._slots = slots
        self._tokens = tokens  # [max_running, columns] int32, on the device
        self._block_size = block_size
        self._dtype = dtype
        self._windows = windows  # of the model's layers, 0 = none
        self._specials = specials  # by first page

    def plan(self, rows: list[Row]) -> Plan:
        order = self._order(rows)
        slots = np.array([rows[i].slot for i in order], np.int64)
        num_tokens = np.array([rows[i].num_tokens for i in order], np.int64)
        starts = self._slots.num_computed[slots]
        offsets = np.cumsum(num_tokens) - num_tokens  # of each row's first token in the batch
        positions = np.arange(num_tokens.sum()) + np.repeat(starts - offsets, num_tokens)
        token_slots = np.repeat(slots, num_tokens)
        blocks = self._slots.block_table[token_slots, positions // self._block_size]
        samples = np.array([rows[i].samples for i in order], bool)
        last_tokens = offsets + num_tokens - 1
        runs = [self._slots.runs[slot] for slot in slots]
        batch = Batch(
            input_ids=self._tokens.view(-1)[self._upload(token_slots * self._tokens.shape[1] + positions)],
            positions=self._upload(positions),
            kv_slots=self._upload(blocks * self._block_size + positions % self._block_size),
            groups=tuple(self._groups(slots, starts, num_tokens, offsets)),
            lora_work=lora_work(runs, num_tokens.tolist(), self._upload, self._tokens.device),
            specials=tuple(special_rows(runs, num_tokens.tolist(), samples.tolist(), self._specials)),
            sample_tokens=None if samples.all() and num_tokens.max() == 1 else self._upload(last_tokens[samples]),
        )
        place = {row: i for i, row in enumerate(np.array(order)[samples].tolist())}
        result_order = np.array([place[i] for i, row in enumerate(rows) if row.samples], np.int64)
        first_tokens = np.empty_like(offsets)
        first_tokens[order] = offsets
        return Plan(batch, slots[samples], (starts + num_tokens)[samples], result_order, first_tokens)

    def _order(self, rows: list[Row]) -> list[int]:
        def key(index: int) -> tuple[bool, int, int]:
            row = rows[index]
            return row.num_tokens > 1, sort_key(self._slots.runs[row.slot]), row.slot

        return sorted(range(len(rows)), key=key)

    def _groups(self, slots: Ints, starts: Ints, num_tokens: Ints, offsets: Ints) -> Iterable[AttentionGroup]:
        """Sequences whose queries and contexts round to the same powers of two."""
        queries = np.where(num_tokens == 1, 1, _round_up(np.maximum(num_tokens, SMALLEST_QUERY)))
        contexts = _round_up(np.maximum(starts + num_tokens, SMALLEST_CONTEXT))
        keys = queries << 32 | contexts
        for key in np.unique(keys):
            rows = (keys == key).nonzero()[0]
            yield self._group(slots[rows], starts[rows], num_tokens[rows], offsets[rows])

    def _group(self, slots: Ints, starts: Ints, num_tokens: Ints, offsets: Ints) -> AttentionGroup:
        q_len, context_lens = int(num_tokens.max()), starts + num_tokens
        context_len = int(context_lens.max())
        is_padded = bool((num_tokens < q_len).any())
        steps = np.arange(q_len)
        queries = offsets[:, None] + np.minimum(steps, num_tokens[:, None] - 1)  # [num_seqs, q_len], padded with the last token
        is_real = (steps < num_tokens[:, None]).ravel()
        return AttentionGroup(
            num_seqs=len(slots),
            q_len=q_len,
            context_len=context_len,
            tokens=self._places(queries.ravel()[is_real]),
            padding=self._upload(queries.ravel()) if is_padded else None,
            unpadding=self._upload(is_real.nonzero()[0]) if is_padded else None,
            blocks=self._blocks(slots, context_lens, context_len),
            masks={window: self._mask(starts, num_tokens, window) for window in self._windows},
        )

    def _blocks(self, slots: Ints, context_lens: Ints, context_len: int) -> slice | Tensor:
        """Padded with each sequence's own first block: nothing of another's is ever read."""
        num_blocks = -(-context_lens // self._block_size)
        table = self._slots.block_table[slots, : -(-context_len // self._block_size)]
        if len(slots) == 1 and bool((np.diff(table[0]) == 1).all()):
            return slice(int(table[0, 0]), int(table[0, -1]) + 1)
        is_padding = np.arange(table.shape[1]) >= num_blocks[:, None]
        return self._upload(np.where(is_padding, table[:, :1], table))

    def _mask(self, starts: Ints, num_tokens: Ints, window: int) -> Mask:
        """A query sees the keys up to itself, no further back than the window; a padded one sees what the last real one sees."""
        context_lens = starts + num_tokens
        q_len, context_len = int(num_tokens.max()), int(context_lens.max())
        is_narrow = 0 < window < context_len
        if not is_narrow and q_len > 1 and not starts.any():  # shorter sequences see their own keys only, and their padding is dropped
            return Mask(None, True)
        if not is_narrow and q_len == 1 and bool((context_lens == context_len).all()):
            return Mask(None, False)
        steps = np.minimum(np.arange(q_len), num_tokens[:, None] - 1)
        last_seen = self._upload(starts[:, None] + steps)[:, None, :, None]  # [num_seqs, 1, q_len, 1]
        keys = torch.arange(context_len, device=last_seen.device)
        is_hidden = keys > last_seen
        if is_narrow:
            is_hidden |= keys <= last_seen - window
        return Mask(torch.zeros(is_hidden.shape, dtype=self._dtype, device=keys.device).masked_fill_(is_hidden, float("-inf")), False)

    def _places(self, places: Ints) -> slice | Tensor:
        if places[-1] - places[0] == len(places) - 1:  # the places rise, so they are neighbours
            return slice(int(places[0]), int(places[-1]) + 1)
        return self._upload(places)

    def _upload(self, values: Ints) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to(self._tokens.device, non_blocking=True)


def _round_up(values: Ints) -> Ints:
    """To the next power of two."""
    return 1 << np.ceil(np.log2(values)).astype(np.int64)
