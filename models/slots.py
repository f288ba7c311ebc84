"""Where each running sequence is: plain host arrays, one entry a slot. Token ids stay on the device; sampling is slot_sampling.py's."""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from loray.models.lora_groups import Run, page_runs
from loray.models.step import Admission, Row


@dataclass(slots=True)
class Slots:
    block_table: NDArray[np.int64]  # [max_running, max_blocks] ids, in the order of the sequence
    num_blocks: NDArray[np.int64]  # [max_running]
    num_computed: NDArray[np.int64]  # [max_running] tokens whose keys and values are in the blocks
    runs: list[tuple[Run, ...]] = field(default_factory=list)  # [max_running] ranks in the LoRA pool, empty = base model

    @classmethod
    def empty(cls, max_running: int, max_blocks: int) -> "Slots":
        table = np.zeros((max_running, max_blocks), np.int64)
        return cls(table, np.zeros(max_running, np.int64), np.zeros(max_running, np.int64), [()] * max_running)

    def admit(self, admission: Admission) -> None:
        slot = admission.slot
        self.num_blocks[slot] = len(admission.block_ids)
        self.block_table[slot, : len(admission.block_ids)] = admission.block_ids
        self.num_computed[slot] = admission.num_computed
        self.runs[slot] = page_runs(admission.page_ids)

    def extend(self, row: Row) -> None:
        """Append the row's new blocks to its table."""
        if row.new_block_ids:
            start = self.num_blocks[row.slot]
            self.num_blocks[row.slot] = end = start + len(row.new_block_ids)
            self.block_table[row.slot, start:end] = row.new_block_ids
