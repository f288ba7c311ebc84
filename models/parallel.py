"""The collectives of one tensor-parallel group. Knows nothing of layers; with one rank it never touches torch.distributed."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from loray.models.shards import cut


@dataclass(slots=True)
class Parallel:
    rank: int = 0
    world_size: int = 1
    group: dist.ProcessGroup | None = None  # None = the default group, or nobody to meet
    _is_apart: bool = False

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Within it this rank waits for no other: what it sums and gathers has the right shapes, but is its own alone."""
        self._is_apart = True
        try:
            yield
        finally:
            self._is_apart = False

    @property
    def is_alone(self) -> bool:
        """Without a group: one rank that has one goes the way of several."""
        return self.world_size == 1 and self.group is None

    def all_reduce(self, x: Tensor) -> Tensor:
        """x becomes the sum of every rank's x, in place."""
        if not (self.is_alone or self._is_apart):
            dist.all_reduce(x, group=self.group)
        return x

    def gather_columns(self, x: Tensor, total: int) -> Tensor:
        """[num_rows, this rank's cut of total] -> [num_rows, total], the same on every rank."""
        if self.is_alone:
            return x
        sizes = [cut(total, rank, self.world_size).size for rank in range(self.world_size)]
        padded = x.new_zeros(x.shape[0], max(sizes))
        padded[:, : x.shape[1]] = x
        parts = [torch.empty_like(padded) for _ in sizes]
        if self._is_apart:
            for part in parts:
                part.copy_(padded)
        else:
            dist.all_gather(parts, padded, group=self.group)
        return torch.cat([part[:, :size] for part, size in zip(parts, sizes, strict=True)], dim=1)

    def any_rank(self, flags: list[bool], device: torch.device) -> list[bool]:
        """For each flag whether it is set on some rank."""
        if self.is_alone:
            return flags
        return [count > 0 for count in self.all_reduce(torch.tensor(flags, dtype=torch.int32, device=device)).tolist()]


def init_parallel(rank: int, world_size: int, master_address: str, master_port: int, device: torch.device) -> Parallel:
    """Meet the other ranks, if there are any. Returns when all are there."""
    if world_size == 1:
        return Parallel()
    host = f"[{master_address}]" if ":" in master_address else master_address
    return join_group(rank, world_size, f"tcp://{host}:{master_port}", device)


def join_group(rank: int, world_size: int, place: str, device: torch.device) -> Parallel:
    """gloo on a CPU, NCCL on a GPU. place: where the ranks meet, a URL."""
    is_gpu = device.type == "cuda"
    dist.init_process_group(
        "nccl" if is_gpu else "gloo", init_method=place, rank=rank, world_size=world_size, device_id=device if is_gpu else None
    )
    return Parallel(rank, world_size, dist.group.WORLD)
