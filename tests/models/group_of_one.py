"""A process group that this process has for itself: one rank goes the way of several."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist

from loray.models.parallel import Parallel, join_group


@contextmanager
def group_of_one(folder: Path, device: str) -> Iterator[Parallel]:
    parallel = join_group(0, 1, f"file://{folder}/{device}", torch.device(device, 0))
    try:
        yield parallel
    finally:
        dist.destroy_process_group()
