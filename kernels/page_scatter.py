"""Brings an adapter's matrices from one flat copy into their places in the rank pages: one launch, however many matrices there are.

It runs beside the steps of others and takes the GPU from them, so it had better be short: as many bytes at once as the addresses allow.
Its twin in plain torch is `fill_ranks` of models/page_writer.py, for one matrix.
"""

import triton
import triton.language as tl
from torch import Tensor

ELEMENTS_AT_ONCE = 2048
ALIGNMENT = 16  # bytes, the most that a thread reads at once


def scatter_pages(source: Tensor, pieces: Tensor, most_rows: int, most_width: int, is_aligned: bool) -> None:
    """For each piece: rows of the source to consecutive rows of a pool, zeros where the source has no more.

    source [elements]; pieces [num_pieces, 6] int64: address of the first row, distance between rows, width of a row (elements),
    number of rows, first element in the source, number of rows there. most_rows, most_width: of any piece.
    is_aligned: rows begin at multiples of ALIGNMENT, in the source and in the pools, and have as many bytes.
    """
    if len(pieces) and most_rows and most_width:
        grid = (len(pieces), most_rows, triton.cdiv(most_width, ELEMENTS_AT_ONCE))
        step = ALIGNMENT // source.element_size() if is_aligned else 1
        _scatter_kernel[grid](source, pieces, STEP=step, BLOCK=ELEMENTS_AT_ONCE)


@triton.jit
def _scatter_kernel(source, pieces, STEP: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    piece = pieces + tl.program_id(0) * 6
    row, column = tl.program_id(1).to(tl.int64), tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    width, num_rows, num_there = tl.multiple_of(tl.load(piece + 2), STEP), tl.load(piece + 3), tl.load(piece + 5)
    if row < num_rows and tl.program_id(2) * BLOCK < width:
        first = tl.multiple_of(tl.load(piece + 4) + row * width, STEP)
        values = tl.load(source + first + column, mask=column < tl.where(row < num_there, width, 0), other=0.0)
        place = tl.load(piece).to(tl.pointer_type(source.dtype.element_ty)) + row * tl.load(piece + 1)
        tl.store(tl.multiple_of(place, STEP * source.dtype.element_ty.primitive_bitwidth // 8) + column, values, mask=column < width)
