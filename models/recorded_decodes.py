"""Decodes on a CPU that are recorded once for each number of rows, and replayed by one call: a CUDA graph's like, for native.c.

Steps with prompts, or with something that native.c does not know, are computed as they are.
"""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from loray.kernels import native
from loray.kernels.lora import LoraSegments
from loray.kernels.native_tape import Recorded
from loray.models.batch import Batch, PagedWork

MAX_ROWS = 64  # beyond, what Python costs does not count
MAX_KEPT = 64  # the least used is recorded anew when it comes back
Key = tuple[int, int]  # rows, and room for pages of an adapter: 0 or a power of two


class RecordedDecodes:
    def __init__(self, hidden: Callable[[Batch], Tensor], max_blocks: int) -> None:
        self._hidden = hidden  # the model's
        self._max_blocks = max_blocks  # of a sequence
        self._kept: OrderedDict[Key, tuple[Batch, Recorded]] = OrderedDict()
        self._is_possible = True  # until a decode turns out to need torch

    def hidden(self, batch: Batch) -> Tensor:
        """[num_tokens, hidden], overwritten by the next call."""
        key = self._key(batch)
        if key is None:
            return self._hidden(batch)
        if key not in self._kept:
            return self._record(key, batch)
        self._kept.move_to_end(key)
        fixed, recorded = self._kept[key]
        _fill(fixed, batch)
        recorded.replay()
        return recorded.output

    def _record(self, key: Key, batch: Batch) -> Tensor:
        fixed = _fixed(batch, key, self._max_blocks)
        output, recorded = native.recorded(lambda: self._hidden(fixed))
        if recorded is None:
            self._is_possible = False
        else:
            self._kept[key] = fixed, recorded
            if len(self._kept) > MAX_KEPT:
                self._kept.popitem(last=False)
        return output

    def _key(self, batch: Batch) -> Key | None:
        """None = not to be recorded."""
        num_rows, work, lora = len(batch.input_ids), batch.attention, batch.lora_work
        is_decode = isinstance(work, PagedWork) and work.num_decodes == num_rows
        if not self._is_possible or not is_decode or num_rows > MAX_ROWS or batch.specials:
            return None
        return num_rows, 1 << (lora.max_pages - 1).bit_length() if isinstance(lora, LoraSegments) else 0


def _fixed(batch: Batch, key: Key, max_blocks: int) -> Batch:
    """The batch in tensors that stay, with room for any other of its key."""
    num_rows, max_pages = key
    assert isinstance(batch.attention, PagedWork)
    table = torch.zeros(num_rows, max_blocks, dtype=torch.int32)
    fixed = replace(
        batch,
        input_ids=torch.zeros_like(batch.input_ids),
        positions=torch.zeros_like(batch.positions),
        kv_slots=torch.zeros_like(batch.kv_slots),
        attention=replace(batch.attention, block_table=table, context_lens=torch.zeros_like(batch.attention.context_lens)),
    )
    if isinstance(batch.lora_work, LoraSegments):
        blocks, page_ids = torch.zeros(num_rows, 4, dtype=torch.int32), torch.zeros(num_rows * max_pages, dtype=torch.int32)
        fixed = replace(fixed, lora_work=replace(batch.lora_work, blocks=blocks, page_ids=page_ids, max_pages=max_pages))
    _fill(fixed, batch)
    return fixed


def _fill(fixed: Batch, batch: Batch) -> None:
    assert isinstance(fixed.attention, PagedWork) and isinstance(batch.attention, PagedWork)
    fixed.input_ids.copy_(batch.input_ids)
    fixed.positions.copy_(batch.positions)
    fixed.kv_slots.copy_(batch.kv_slots)
    fixed.attention.block_table[:, : batch.attention.block_table.shape[1]] = batch.attention.block_table
    fixed.attention.context_lens.copy_(batch.attention.context_lens)
    if isinstance(fixed.lora_work, LoraSegments) and isinstance(batch.lora_work, LoraSegments):
        fixed.lora_work.blocks.zero_()
        fixed.lora_work.blocks[: len(batch.lora_work.blocks)] = batch.lora_work.blocks
        fixed.lora_work.page_ids[: len(batch.lora_work.page_ids)] = batch.lora_work.page_ids
