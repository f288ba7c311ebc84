"""Root-mean-square normalisation on a GPU, one launch, one program a row. Its twin in plain torch is norm.py."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from loray.kernels.delta import Parted
from loray.kernels.delta_triton import delta_arguments, load_updated
from loray.kernels.linked import LINKED, wait_for_earlier

MAX_SIZE = 16384  # a row lies in the registers of one program


def rms_norm(x: Tensor, weight: Tensor, eps: float, out: Tensor | None = None) -> Tensor:
    """x / sqrt(mean(x²) + eps) rounded to weight's dtype, times weight; the root in float32. The result has x's dtype.

    x [num_tokens, size] or [num_tokens, num_heads, size], weight [size]; out may be x itself.
    """
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device) if out is None else out
    assert x.dim() in (2, 3) and out.shape == x.shape and weight.shape == x.shape[-1:]
    assert x.stride(-1) == 1 and out.stride(-1) == 1 and weight.is_contiguous(), "rows are contiguous"
    num_heads, x_head, out_head = (1, 0, 0) if x.dim() == 2 else (x.shape[1], x.stride(1), out.stride(1))
    block, num_warps = _block(x.shape[-1])
    _rms_norm_kernel[(len(x), num_heads)](
        *(x, weight, out, eps, x.stride(0), x_head, out.stride(0), out_head),
        SIZE=x.shape[-1],
        BLOCK=block,
        num_warps=num_warps,
        **LINKED,
    )
    return out


def add_rms_norm(x: Tensor, added: Parted, weight: Tensor, eps: float, scale: float = 1.0) -> Tensor:
    """x += scale * added in place, rounded to x's dtype; then rms_norm(x). x, added and the result [num_tokens, size]."""
    y = added.y
    num_tokens, size = x.shape
    assert y.shape == x.shape and weight.shape == (size,)
    assert x.stride(1) == 1 and y.stride(1) == 1 and weight.is_contiguous(), "rows are contiguous"
    out = torch.empty(num_tokens, size, dtype=x.dtype, device=x.device)
    block, num_warps = _block(size)
    _add_rms_norm_kernel[(num_tokens,)](
        *(x, y, weight, out, eps, float(scale), *delta_arguments(added), x.stride(0), y.stride(0)),
        SIZE=size,
        BLOCK=block,
        HAS_DELTA=added.delta is not None,
        num_warps=num_warps,
        **LINKED,
    )
    return out


def _block(size: int) -> tuple[int, int]:
    """Columns of a program and its warps: 8 columns a thread, which are one 16-byte access, as long as a program may have the threads."""
    assert 0 < size <= MAX_SIZE, f"rows of {size} are wider than {MAX_SIZE}"
    block = triton.next_power_of_2(size)
    return block, min(max(block // 256, 1), 16)


@triton.jit
def _store_normed(x, weight, out, column, is_column, eps, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Of one row: x float32, 0 beyond its end; weight and out where their rows begin."""
    rms = tl.sqrt(tl.sum(x * x, 0) / SIZE + eps)
    normed = (x / rms).to(weight.dtype.element_ty).to(tl.float32)
    normed *= tl.load(weight + column, mask=is_column, other=0.0).to(tl.float32)
    tl.store(out + column, normed.to(out.dtype.element_ty), mask=is_column)


@triton.jit
def _rms_norm_kernel(  # type: ignore[no-untyped-def]
    x, weight, out, eps, x_stride, x_head_stride, out_stride, out_head_stride, SIZE: tl.constexpr, BLOCK: tl.constexpr
):
    """out[t, h] = x[t, h] / sqrt(mean(x[t, h]²) + eps) * weight for one token and head."""
    wait_for_earlier()
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = tl.arange(0, BLOCK)
    is_column = column < SIZE
    row = tl.load(x + token * x_stride + head * x_head_stride + column, mask=is_column, other=0.0).to(tl.float32)
    _store_normed(row, weight, out + token * out_stride + head * out_head_stride, column, is_column, eps, SIZE)


@triton.jit
def _add_rms_norm_kernel(  # type: ignore[no-untyped-def]
    x,
    y,
    weight,
    out,
    eps,
    scale,
    delta,
    has_delta,
    delta_stride,
    x_stride,
    y_stride,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_DELTA: tl.constexpr,
):
    """x[t] += scale * (y[t] + delta[t]); out[t] = x[t] / sqrt(mean(x[t]²) + eps) * weight for one token."""
    wait_for_earlier()
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    is_column = column < SIZE
    added = load_updated(y, token * y_stride + column, delta, token * delta_stride + column, has_delta, token, is_column, HAS_DELTA)
    place = x + token * x_stride + column
    total = tl.load(place, mask=is_column, other=0.0).to(tl.float32) + scale * added
    total = total.to(x.dtype.element_ty)
    tl.store(place, total, mask=is_column)
    _store_normed(total.to(tl.float32), weight, out + token * SIZE, column, is_column, eps, SIZE)
