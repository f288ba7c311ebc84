"""Reads a linear layer's output with the low-rank update that was computed beside it. For other kernels; its twin is in delta.py."""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from loray.kernels.delta import Parted


class DeltaArguments(NamedTuple):
    """Of a kernel. Without a delta the pointers are those of y and never read."""

    delta: Tensor
    has_delta: Tensor  # [num_tokens] int32
    stride: int  # of delta's rows


def delta_arguments(parted: Parted) -> DeltaArguments:
    y, delta, has_delta = parted
    if delta is None:
        return DeltaArguments(y, y, 0)
    assert has_delta is not None and has_delta.is_contiguous() and len(has_delta) == len(y), "one flag for each token"
    assert delta.shape == y.shape and delta.stride(1) == 1, "a delta has y's shape and contiguous rows"
    return DeltaArguments(delta, has_delta, delta.stride(0))


@triton.jit
def load_updated(  # type: ignore[no-untyped-def]
    y, y_offset, delta, delta_offset, has_delta, token, mask, HAS_DELTA: tl.constexpr
):
    """y, or y + delta rounded to y's dtype where the token has one, as float32."""
    value = tl.load(y + y_offset, mask=mask, other=0.0)
    if HAS_DELTA:
        is_there = tl.where(mask, tl.load(has_delta + token), 0) != 0
        added = tl.load(delta + delta_offset, mask=is_there, other=0.0)
        value = (value.to(tl.float32) + added.to(tl.float32)).to(value.dtype)
    return value.to(tl.float32)
