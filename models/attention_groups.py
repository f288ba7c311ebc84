"""Puts a step's sequences into groups that are attended in one padded call each: order, padding, masks. Host arithmetic, then uploads."""

from collections.abc import Iterable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from loray.kernels import native
from loray.models.batch import AttentionGroup, AttentionWork, Mask, PagedWork
from loray.models.layout import Layout
from loray.models.slots import Slots
from loray.models.to_device import upload

Ints = NDArray[np.int64]
SMALLEST_CONTEXT = 256  # shorter contexts share a group: another call costs more than their padding
SMALLEST_QUERY = 16


class GroupPlanner:
    def __init__(self, slots: Slots, block_size: int, dtype: torch.dtype, device: torch.device, windows: frozenset[int]) -> None:
        self._slots = slots
        self._block_size = block_size
        self._dtype = dtype
        self._device = device
        self._windows = windows  # of the model's layers, 0 = none

    def plan(self, layout: Layout) -> AttentionWork:
        num_decodes = int((layout.num_tokens == 1).sum()) if native.serves(self._device, self._dtype) else 0
        rest = slice(num_decodes, None)
        groups = tuple(self._groups(layout.slots[rest], layout.starts[rest], layout.num_tokens[rest], layout.offsets[rest]))
        if not num_decodes:
            return groups
        context_lens = layout.context_lens[:num_decodes]
        table = self._slots.block_table[layout.slots[:num_decodes], : -(-context_lens.max() // self._block_size)]
        return PagedWork(num_decodes, self._upload(table).int(), self._upload(context_lens).int(), groups)

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
        return upload(values, self._device)


def _round_up(values: Ints) -> Ints:
    """To the next power of two."""
    return 1 << np.ceil(np.log2(values)).astype(np.int64)
