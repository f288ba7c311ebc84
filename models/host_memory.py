"""Host memory for adapters, which come and go: it is the machine's again as soon as its tensor is dropped. Knows nothing of them."""

import mmap

import torch
from torch import Tensor

MIN_MAPPED_BYTES = 1 << 20  # what is smaller fills the allocator's gaps instead of making them


def host_tensor(num_elements: int, dtype: torch.dtype, is_pinned: bool = False) -> Tensor:
    """[num_elements], with any values. The allocator keeps what large pieces of many sizes leave behind, so these are mapped."""
    num_bytes = num_elements * dtype.itemsize
    if is_pinned or num_bytes < MIN_MAPPED_BYTES:
        return torch.empty(num_elements, dtype=dtype, pin_memory=is_pinned)
    return torch.frombuffer(mmap.mmap(-1, num_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), dtype=dtype)
