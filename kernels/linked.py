"""Kernels that are launched while the one before them still runs, and wait for its end by themselves: the way to the GPU and the start
of a kernel, more than a microsecond each, pass meanwhile. GPUs from compute capability 9.0 on can do so ("programmatic dependent launch").

Every kernel that is launched with LINKED calls `wait_for_earlier` before it writes anything, and before it reads what a kernel writes.
"""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from loray.kernels.choice import IS_INTERPRETED

FIRST_CAPABILITY = (9, 0)
HAS_GPU = torch.cuda.is_available() and not IS_INTERPRETED
IS_LINKED = tl.constexpr(HAS_GPU and torch.cuda.get_device_capability() >= FIRST_CAPABILITY)
LINKED = {"launch_pdl": True} if IS_LINKED.value else {}  # of a launch


@triton.jit
def wait_for_earlier():  # type: ignore[no-untyped-def]
    """Whatever was launched before has ended and written; what is launched after may come onto the GPU, and wait there."""
    if IS_LINKED:
        gdc_wait()
        gdc_launch_dependents()
