"""Brings an adapter's matrices from one flat copy into their places in the rank pages: one launch, however many matrices there are.

Its twin in plain torch is `fill_ranks` of models/page_writer.py, for one matrix.
"""

import triton
import triton.language as tl
from torch import Tensor

ELEMENTS_AT_ONCE = 4096


def scatter_pages(source: Tensor, pieces: Tensor, most_elements: int) -> None:
    """For each piece: rows of the source to consecutive rows of a pool, zeros where the source has no more.

    source [elements]; pieces [num_pieces, 6] int64: address of the first row, distance between rows, width of a row (elements),
    number of rows, first element in the source, number of rows there. most_elements: rows * width of the largest piece.
    """
    if len(pieces) and most_elements:
        grid = (len(pieces), triton.cdiv(most_elements, ELEMENTS_AT_ONCE))
        _scatter_kernel[grid](source, pieces, BLOCK=ELEMENTS_AT_ONCE)


@triton.jit
def _scatter_kernel(source, pieces, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    piece = pieces + tl.program_id(0) * 6
    address, stride, width = tl.load(piece), tl.load(piece + 1), tl.load(piece + 2)
    num_elements, num_there = tl.load(piece + 3) * width, tl.load(piece + 5) * width
    element = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(source + tl.load(piece + 4) + element, mask=element < num_there, other=0.0)
    place = address.to(tl.pointer_type(source.dtype.element_ty)) + (element // width) * stride + element % width
    tl.store(place, values, mask=element < num_elements)
