"""Brings rows to float8 on a GPU, one launch, one program a row. Its twin in plain torch is in float8_linear.py."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from loray.kernels.float8_linear import FLOAT8, LARGEST, SMALLEST_SCALE

MAX_BLOCK = 4096  # columns at once


def quantise_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """x is about values * scales, where scales = max |x| / 448 over each row.

    x [rows, columns] -> values [rows, columns] float8, scales [rows, 1] float32, never 0
    """
    num_rows, size = x.shape
    assert size > 0 and x.stride(1) == 1, "rows are contiguous"
    values = torch.empty(num_rows, size, dtype=FLOAT8, device=x.device)
    scales = torch.empty(num_rows, 1, dtype=torch.float32, device=x.device)
    block = min(triton.next_power_of_2(size), MAX_BLOCK)
    _quantise_rows_kernel[(num_rows,)](
        *(x, values, scales, x.stride(0)),
        SIZE=size,
        LARGEST=LARGEST,
        SMALLEST_SCALE=SMALLEST_SCALE,
        BLOCK=block,
        num_warps=max(block // 512, 1),  # 16 columns a thread: as float8, one 16-byte access
    )
    return values, scales


@triton.jit
def _quantise_rows_kernel(  # type: ignore[no-untyped-def]
    x, values, scales, x_stride, SIZE: tl.constexpr, LARGEST: tl.constexpr, SMALLEST_SCALE: tl.constexpr, BLOCK: tl.constexpr
):
    """scales[r] = max |x[r]| / LARGEST; values[r] = x[r] / scales[r], for one row."""
    row = tl.program_id(0).to(tl.int64)
    x += row * x_stride
    values += row * SIZE
    columns = tl.arange(0, BLOCK)
    largest = tl.zeros([BLOCK], tl.float32)
    for start in range(0, SIZE, BLOCK):
        part = tl.load(x + start + columns, mask=start + columns < SIZE, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, tl.where(part == part, tl.abs(part), float("inf")))  # a maximum drops what is no number
    scale = tl.maximum(tl.max(largest, 0) / LARGEST, SMALLEST_SCALE)
    tl.store(scales + row, scale)
    for start in range(0, SIZE, BLOCK):
        is_column = start + columns < SIZE
        part = tl.load(x + start + columns, mask=is_column, other=0.0).to(tl.float32) / scale
        part = tl.minimum(tl.maximum(part, -LARGEST), LARGEST)
        tl.store(values + start + columns, part.to(values.dtype.element_ty), mask=is_column)
