"""The fixed buffers from which captured steps read what they are about, filled by one copy a step.

Every token is a row of its own, as in a decode: keys and values are stored before anything is attended, so a prompt's token finds those
before it where a decode would find them.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from loray.kernels.lora import SHORT_BLOCK, LoraSegments
from loray.models.adapter import PAGE_RANK
from loray.models.batch import Batch, PagedWork
from loray.models.layout import Layout
from loray.models.lora_groups import segment_tables

MAX_PAGES = 32  # of an adapter in a captured decode, which has room for so many ranks; one with more is computed without
NUM_IN_TURN = 3  # host buffers: one is filled, while those of the steps before are still read
TOKEN_PLACE, POSITION, KV_SLOT, CONTEXT_LEN, SAMPLE_PLACE, SLOT = range(6)
NOWHERE = -1


class DecodeInputs:
    def __init__(self, max_rows: int, tokens: Tensor, table: Tensor) -> None:
        self.max_rows = max_rows  # tokens of a step
        self._tokens = tokens  # [max_running + 1, columns] int32
        self._table = table  # [max_running + 1, max_blocks] int32
        self._max_running = len(tokens) - 1
        self._sizes = 4 * self._num_blocks(max_rows), MAX_PAGES * self._max_running, max_rows  # of LoRA's tables
        num_words = 6 * max_rows + sum(self._sizes) // 2 + 1
        device = tokens.device
        self._device_words = torch.zeros(num_words, dtype=torch.int64, device=device)
        self._host_words = [
            torch.zeros(num_words, dtype=torch.int64, device="cpu", pin_memory=device.type == "cuda") for _ in range(NUM_IN_TURN)
        ]
        self._copied: list[torch.cuda.Event | None] = [None] * NUM_IN_TURN
        self._turn = 0
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # of LoRA updates

    def fill(self, layout: Layout, num_rows: int) -> None:
        """For the tokens of this layout, padded to num_rows with rows that are nobody's."""
        self._turn = (self._turn + 1) % NUM_IN_TURN
        copied = self._copied[self._turn]
        if copied is not None:
            copied.synchronize()
        words = self._host_words[self._turn]
        rows, blocks, page_ids, is_updated = (part.numpy() for part in self._parts(words))
        self._fill_rows(rows[:, :num_rows], layout)
        is_updated[:num_rows] = 0
        blocks[: self._num_blocks(num_rows)] = 0
        if any(layout.runs):
            tables = segment_tables(layout.runs, layout.num_tokens.tolist(), SHORT_BLOCK)
            blocks[: len(tables.blocks)] = tables.blocks
            page_ids[: len(tables.page_ids)] = tables.page_ids
            is_updated[: len(tables.is_updated)] = tables.is_updated
        self._device_words.copy_(words, non_blocking=True)
        if words.is_pinned():
            self._copied[self._turn] = event = torch.cuda.Event()
            event.record()

    def batch(self, num_rows: int, has_lora: bool) -> Batch:
        """Reads the buffers whenever it is computed."""
        rows = self._parts(self._device_words)[0][:, :num_rows]
        table = self._table.index_select(0, rows[SLOT])
        return Batch(
            input_ids=self._tokens.view(-1)[rows[TOKEN_PLACE]],
            positions=rows[POSITION],
            kv_slots=rows[KV_SLOT],
            attention=PagedWork(num_rows, table, rows[CONTEXT_LEN].int(), None),
            lora_work=self._segments(num_rows) if has_lora else (),
            specials=(),
            sample_tokens=None,
        )

    def keep(self, token_ids: Tensor) -> None:
        """The rows' new tokens become their slots'. token_ids: [num_rows]."""
        places = self._parts(self._device_words)[0][SAMPLE_PLACE, : len(token_ids)]
        self._tokens.view(-1).index_copy_(0, places, token_ids.int())

    def _fill_rows(self, rows: NDArray[np.int64], layout: Layout) -> None:
        num_real, num_columns = len(layout.positions), self._tokens.shape[1]
        nobody = len(self._tokens) - 1
        slots = layout.token_slots
        sample_places = np.full(num_real, nobody * num_columns)
        sample_places[layout.sample_tokens] = layout.sample_slots * num_columns + layout.sample_positions
        token_places = slots * num_columns + layout.positions
        rows[:, :num_real] = (token_places, layout.positions, layout.kv_slots, layout.positions + 1, sample_places, slots)
        rows[:, num_real:] = np.array([[nobody * num_columns], [0], [NOWHERE], [0], [nobody * num_columns], [nobody]])

    def _segments(self, num_rows: int) -> LoraSegments:
        _, blocks, page_ids, is_updated = self._parts(self._device_words)
        return LoraSegments(
            blocks=blocks[: self._num_blocks(num_rows)],
            page_ids=page_ids,
            is_updated=is_updated[:num_rows],
            block_tokens=SHORT_BLOCK,
            max_pages=MAX_PAGES,
            page_rank=PAGE_RANK,
            stream=self._stream,
        )

    def _num_blocks(self, num_rows: int) -> int:
        """The most that so many tokens are cut into: each sequence has a block that is not full."""
        return min(num_rows, self._max_running + num_rows // SHORT_BLOCK)

    def _parts(self, words: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The rows [6, max_rows] int64; of LoRA, all int32: blocks [num_blocks, 4], page_ids and is_updated [max_rows]."""
        num_words = 6 * self.max_rows
        blocks, page_ids, is_updated = words[num_words:].view(torch.int32)[: sum(self._sizes)].split(self._sizes)
        return words[:num_words].view(6, self.max_rows), blocks.view(-1, 4), page_ids, is_updated
