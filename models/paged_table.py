"""The block table of every slot, on the device, where kernels look blocks up. Which block belongs to whom, the driver knows."""

from collections.abc import Iterable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from loray.kernels.attention import PromptWork
from loray.models.batch import PagedWork
from loray.models.layout import Layout
from loray.models.runner_sizes import RunnerSizes
from loray.models.slots import Slots
from loray.models.step import Admission, Row
from loray.models.to_device import upload

Ints = NDArray[np.int64]


class PagedTable:
    def __init__(self, slots: Slots, sizes: RunnerSizes, device: torch.device) -> None:
        self._slots = slots
        self._block_size, self._most_copied_keys = sizes.block_size, sizes.most_copied_keys
        # One row more, for rows of a batch that are nobody's.
        self.blocks = torch.zeros(len(slots.block_table) + 1, slots.block_table.shape[1], dtype=torch.int32, device=device)

    def update(self, admissions: Iterable[Admission], rows: Iterable[Row]) -> None:
        """Bring over what these have changed in the slots."""
        max_blocks = self.blocks.shape[1]
        changed = [admission.slot * max_blocks + np.arange(len(admission.block_ids)) for admission in admissions]
        for row in rows:
            if row.new_block_ids:
                end = self._slots.num_blocks[row.slot]
                changed.append(row.slot * max_blocks + np.arange(end - len(row.new_block_ids), end))
        places = np.concatenate(changed) if changed else np.empty(0, np.int64)
        if len(places):
            entries = np.stack((places, self._slots.block_table.reshape(-1)[places]))
            where, what = self._upload(entries)
            self.blocks.view(-1).index_copy_(0, where, what.int())

    def plan(self, layout: Layout) -> PagedWork:
        num_decodes = int((layout.num_tokens == 1).sum())
        max_blocks = int(-(-layout.context_lens.max() // self._block_size))
        slots, context_lens = self._upload(np.stack((layout.slots, layout.context_lens)))
        table = self.blocks[:, :max_blocks].index_select(0, slots)
        prompts = self._prompts(layout.num_tokens[num_decodes:], layout.context_lens[num_decodes:])
        may_copy = prompts is not None and prompts.num_keys <= self._most_copied_keys
        return PagedWork(num_decodes, table, context_lens.int(), prompts, may_copy)

    def _prompts(self, num_tokens: Ints, context_lens: Ints) -> PromptWork | None:
        if not len(num_tokens):
            return None
        ends = np.stack((num_tokens, context_lens)).cumsum(1)
        first_queries, first_keys = self._upload(np.pad(ends, ((0, 0), (1, 0)))).int()
        return PromptWork(first_queries, first_keys, int(ends[1, -1]), int(num_tokens.max()), int(context_lens.max()))

    def _upload(self, values: Ints) -> Tensor:
        return upload(values, self.blocks.device)
