"""Host memory for adapters, which come and go: it is the machine's again once its tensor is dropped. Knows nothing of them."""

import atexit
import logging
import mmap
import threading
import weakref
from contextlib import suppress
from functools import cache
from queue import SimpleQueue

import numpy as np
import torch
from torch import Tensor

logger = logging.getLogger("loray.adapters")
MIN_MAPPED_BYTES = 1 << 20  # what is smaller fills the allocator's gaps instead of making them
END_S = 10.0  # a GPU that hangs shall not hold up the end of the process

Pinned = tuple[int, mmap.mmap]  # address


def host_tensor(num_elements: int, dtype: torch.dtype, is_pinned: bool = False) -> Tensor:
    """[num_elements], with any values. The allocator keeps what large pieces of many sizes leave behind, so these are mapped.

    Torch's allocator of pinned memory keeps every piece for ever, so there all are, and CUDA is told of them."""
    num_bytes = num_elements * dtype.itemsize
    if num_bytes < (1 if is_pinned else MIN_MAPPED_BYTES):
        return torch.empty(num_elements, dtype=dtype)
    mapping = mmap.mmap(-1, num_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    owner = np.frombuffer(mapping, np.uint8)  # the tensor's memory holds it and nothing else does, so they die together
    values = torch.from_numpy(owner).view(dtype)
    if is_pinned:
        with suppress(OSError):  # a system without them
            mapping.madvise(mmap.MADV_HUGEPAGE)
        values.zero_()  # its pages come now, beside the steps: CUDA would hold up every launch while it waits for them
        error = register(values)
        if error:
            logger.warning("%d bytes could not be pinned, and get to the GPU more slowly: %s", num_bytes, error)
        else:
            weakref.finalize(owner, _dropped().put, (values.data_ptr(), mapping)).atexit = False  # then the machine takes all
    return values


def register(values: Tensor) -> str:
    """Pins its memory; why it could not, "" if it could. Launches of other threads wait for it (H200, 42 MB): 1 ms where its pages are
    there and huge, 14 ms where they are yet to come."""
    if not torch.cuda.is_available():
        return "there is no GPU"
    cudart = torch.cuda.cudart()
    code = cudart.cudaHostRegister(values.data_ptr(), values.nbytes, 0)
    if int(code):
        with suppress(RuntimeError):  # the thread's next launch tells the error, as if it were its own: let it be this one
            torch.ones(1, device="cuda")
        return str(cudart.cudaGetErrorString(code))
    return ""


@cache
def _dropped() -> "SimpleQueue[Pinned | None]":
    """In it, memory waits to be unpinned by a thread of its own: who drops a tensor, between two steps, must not wait for the GPU."""
    dropped: SimpleQueue[Pinned | None] = SimpleQueue()
    thread = threading.Thread(target=_unpin_all, args=(dropped,), name="host-memory", daemon=True)
    thread.start()
    atexit.register(_end, dropped, thread)
    return dropped


def _end(dropped: "SimpleQueue[Pinned | None]", thread: threading.Thread) -> None:
    """A thread that comes back from CUDA after the interpreter has ended brings the process down with an abort (Python below 3.14)."""
    dropped.put(None)
    thread.join(END_S)


def _unpin_all(dropped: "SimpleQueue[Pinned | None]") -> None:
    while pinned := dropped.get():
        _unpin(*pinned)


def _unpin(address: int, mapping: mmap.mmap) -> None:
    torch.cuda.synchronize()  # a copy out of it may still be on its way: torch looks after its own memory only
    code = torch.cuda.cudart().cudaHostUnregister(address)
    if int(code):
        logger.error("%d bytes of pinned memory could not be freed: %s", len(mapping), torch.cuda.cudart().cudaGetErrorString(code))
    with suppress(BufferError):  # the tensor is not quite gone yet, and takes it along
        mapping.close()  # outside the interpreter's lock, unlike when it is merely dropped
