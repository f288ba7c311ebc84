"""A process group that this process has for itself: one rank goes the way of several."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist

from loray.models.parallel import Parallel


@contextmanager
def group_of_one(folder: Path, device: str) -> Iterator[Parallel]:
    on_gpu = {"device_id": torch.device(device, 0)} if device == "cuda" else {}
    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{folder}/{backend}", rank=0, world_size=1, **on_gpu)
    try:
        yield Parallel(0, 1, dist.group.WORLD)
    finally:
        dist.destroy_process_group()
