"""What a rank remembers of each running sequence between steps: plain host arrays, one entry a slot. Token ids stay on the device."""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from loray.models.lora_groups import Run, page_runs
from loray.models.sampler import SamplingRows
from loray.models.step import Admission, Row


@dataclass(slots=True)
class Slots:
    block_table: NDArray[np.int64]  # [max_running, max_blocks] ids, in the order of the sequence
    num_blocks: NDArray[np.int64]  # [max_running]
    num_computed: NDArray[np.int64]  # [max_running] tokens whose keys and values are in the blocks
    temperature: NDArray[np.float32]  # [max_running]
    top_k: NDArray[np.int64]  # [max_running]
    top_p: NDArray[np.float32]  # [max_running]
    seed: NDArray[np.uint64]  # [max_running]
    runs: list[tuple[Run, ...]] = field(default_factory=list)  # [max_running] ranks in the LoRA pool, empty = base model

    @classmethod
    def empty(cls, max_running: int, max_blocks: int) -> "Slots":
        table = np.zeros((max_running, max_blocks), np.int64)
        ints, floats = np.zeros((3, max_running), np.int64), np.zeros((2, max_running), np.float32)
        return cls(table, ints[0], ints[1], floats[0], ints[2], floats[1], np.zeros(max_running, np.uint64), [()] * max_running)

    def admit(self, admission: Admission) -> None:
        slot, sampling = admission.slot, admission.sampling
        self.num_blocks[slot] = len(admission.block_ids)
        self.block_table[slot, : len(admission.block_ids)] = admission.block_ids
        self.num_computed[slot] = admission.num_computed
        self.temperature[slot], self.top_k[slot] = sampling.temperature, sampling.top_k
        self.top_p[slot], self.seed[slot] = sampling.top_p, sampling.seed
        self.runs[slot] = page_runs(admission.page_ids)

    def extend(self, row: Row) -> None:
        """Append the row's new blocks to its table."""
        if row.new_block_ids:
            start = self.num_blocks[row.slot]
            self.num_blocks[row.slot] = end = start + len(row.new_block_ids)
            self.block_table[row.slot, start:end] = row.new_block_ids

    def sampling(self, slots: NDArray[np.int64], position: NDArray[np.int64]) -> SamplingRows:
        return SamplingRows(self.temperature[slots], self.top_k[slots], self.top_p[slots], self.seed[slots], position)
