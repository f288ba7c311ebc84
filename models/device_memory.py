"""How much memory a rank may still take, how it is taken, and what to do when it took too much."""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from loray.models.parallel import Parallel

# What CUDA, cuBLAS, x86's and ARM's allocators say.
OUT_OF_MEMORY = "out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "can't allocate memory", "not enough memory"


def claimed(pool: Tensor) -> Tensor:
    """The same, all of its memory taken: a CPU's comes page by page when it is first written, hours after a start that seemed to fit."""
    return pool.zero_() if pool.device.type == "cpu" else pool


def free_bytes(device: torch.device, memory_fraction: float) -> int:
    """What is left until memory_fraction of the GPU is in use; the rest is for activations. 0 on a CPU."""
    if device.type != "cuda":
        return 0
    torch.cuda.current_blas_handle()  # cuBLAS takes its own memory with its first product
    free, total = torch.cuda.mem_get_info(device)
    return max(0, int(total * memory_fraction) - (total - free))


def fits(work: Callable[[], object]) -> bool:
    """Does it; false where memory did not suffice."""
    try:
        work()
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        return False
    return True


def all_fit(parallel: Parallel, device: torch.device, work: Callable[[], object]) -> bool:
    """Does it, apart from the other ranks: one that ran out would keep them waiting for its part of a sum. Whether no rank ran out."""
    with parallel.apart():
        is_short = not fits(work)
    return not parallel.any_rank([is_short], device)[0]


@contextmanager
def must_fit() -> Iterator[None]:
    """Around what ranks do together: where one runs out of memory all must end, for the others wait for its part of a sum."""
    try:
        yield
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        raise MemoryError("a rank ran out of memory in a first step with the others: lower kv_cache.memory_fraction") from error


@contextmanager
def weights_fit(device: torch.device) -> Iterator[None]:
    """Where a model's weights are loaded: says what helps if there is no room for them."""
    try:
        yield
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        where = f"{torch.cuda.get_device_name(device)}, of {_shown_memory(device)}" if device.type == "cuda" else "this machine's memory"
        raise MemoryError(f"the model's weights do not fit into {where}: a larger tensor_parallel_size needs less on each rank") from error


def _shown_memory(device: torch.device) -> str:
    free, total = torch.cuda.mem_get_info(device)
    return f"{total / 1e9:.1f} GB, {(total - free) / 1e9:.1f} GB in use"


def is_out_of_memory(error: BaseException) -> bool:
    """On a GPU or, in other words, on a CPU; or came of such an error, as that of a capture which could not be ended after it."""
    is_one = isinstance(error, torch.OutOfMemoryError) or any(words in str(error) for words in OUT_OF_MEMORY)
    return is_one or (error.__context__ is not None and is_out_of_memory(error.__context__))


def release(device: torch.device) -> None:
    """What nobody holds any more goes back to the device."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
