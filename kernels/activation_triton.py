"""The gate of a gated MLP on a GPU, one launch. Its twin in plain torch is activation.py."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from loray.kernels.delta import Parted
from loray.kernels.delta_triton import delta_arguments, load_updated
from loray.kernels.linked import LINKED, wait_for_earlier

BLOCK, NUM_WARPS = 1024, 4  # columns of a program: 8 a thread, which are one 16-byte access; an MLP of 14336 is 14 programs a token


def gate(name: str, gate_up: Parted) -> Tensor:
    """act(gate) * up, each rounded to the model's dtype. gate_up [num_tokens, 2 * intermediate] -> [num_tokens, intermediate].

    `name` is one of KERNEL_NAMES' values.
    """
    y = gate_up.y
    num_tokens, size = len(y), y.shape[1] // 2
    assert y.dim() == 2 and y.shape[1] % 2 == 0 and y.stride(1) == 1, "rows are contiguous, gate | up"
    out = torch.empty(num_tokens, size, dtype=y.dtype, device=y.device)
    _gate_kernel[(num_tokens, triton.cdiv(size, BLOCK))](
        *(y, out, *delta_arguments(gate_up), y.stride(0)),
        SIZE=size,
        NAME=name,
        HAS_DELTA=gate_up.delta is not None,
        BLOCK_C=BLOCK,
        num_warps=NUM_WARPS,
        **LINKED,
    )
    return out


@triton.jit
def activated(x, NAME: tl.constexpr):  # type: ignore[no-untyped-def]
    """float32 -> float32"""
    if NAME == "silu":
        result = x / (1.0 + tl.exp(-x))
    elif NAME == "gelu":
        result = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    else:
        tl.static_assert(NAME == "gelu_tanh")
        inner = 0.7978845608028654 * (x + 0.044715 * x * x * x)
        result = x / (1.0 + tl.exp(-2.0 * inner))  # 0.5 * (1 + tanh(u)) is the logistic function of 2u
    return result


@triton.jit
def _gate_kernel(  # type: ignore[no-untyped-def]
    gate_up,
    out,
    delta,
    has_delta,
    delta_stride,
    stride,
    SIZE: tl.constexpr,
    NAME: tl.constexpr,
    HAS_DELTA: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """out[t, c] = act(gate_up[t, c]) * gate_up[t, SIZE + c] for one token and BLOCK_C columns."""
    wait_for_earlier()
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    is_column = column < SIZE
    gate_offset, delta_offset = token * stride + column, token * delta_stride + column
    gated = load_updated(gate_up, gate_offset, delta, delta_offset, has_delta, token, is_column, HAS_DELTA)
    up = load_updated(gate_up, gate_offset + SIZE, delta, delta_offset + SIZE, has_delta, token, is_column, HAS_DELTA)
    gated = activated(gated, NAME).to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + token * SIZE + column, (gated * up).to(out.dtype.element_ty), mask=is_column)
