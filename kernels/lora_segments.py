"""Adds low-rank updates to a linear layer's output on a GPU, each token with its own adapter: two launches, whatever adapters there are.

Its twin in plain torch is `add_lora` of lora.py, over groups instead.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from loray.kernels.lora import COLUMNS_AT_ONCE, LoraPages, LoraSegments

RANKS_AT_ONCE = 16  # the least that tensor cores multiply; an odd number of pages is padded with nothing


def add_lora_segments(y: Tensor, x: Tensor, pages: LoraPages, segments: LoraSegments) -> None:
    """y[t, columns of i] += (x[t] @ a[i, ranks of t].T) @ b[ranks of t, columns of i] for each token t and each fused projection i.

    x [num_tokens, in], y [num_tokens, sum(widths)], in place.
    """
    a, b, columns = pages.a, pages.b, pages.columns
    num_projections, _, num_inputs = a.shape
    assert x.stride(1) == 1 and y.stride(1) == 1 and a.is_contiguous() and b.is_contiguous(), "rows are contiguous"
    if not num_inputs or not len(segments.blocks):
        return
    num_rank_blocks = triton.cdiv(segments.max_pages * segments.page_rank, RANKS_AT_ONCE)
    shrunk = torch.empty(num_projections, len(x), num_rank_blocks * RANKS_AT_ONCE, dtype=torch.float32, device=x.device)
    shape: dict[str, Any] = {"BLOCK_T": segments.block_tokens, "BLOCK_R": RANKS_AT_ONCE, "PAGE": segments.page_rank}
    shape["PRECISION"] = "ieee" if x.dtype == torch.float32 else "tf32"  # of float32 alone
    work = (segments.blocks, segments.page_ids)
    _shrink_kernel[(len(segments.blocks), num_projections, num_rank_blocks)](
        x, a, shrunk, *work, num_inputs, x.stride(0), a.stride(0), shrunk.stride(0), shrunk.stride(1), BLOCK_K=128, **shape
    )
    _expand_kernel[(len(segments.blocks), len(columns))](
        shrunk, b, y, columns, *work, shrunk.stride(0), shrunk.stride(1), b.stride(0), y.stride(0), BLOCK_C=COLUMNS_AT_ONCE, **shape
    )


@triton.jit
def _rank_rows(page_ids, first_page, num_pages, rank_block, BLOCK_R: tl.constexpr, PAGE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Rows of the pool for BLOCK_R ranks of an adapter, and which of them it has."""
    rank = rank_block * BLOCK_R + tl.arange(0, BLOCK_R)
    is_there = rank < num_pages * PAGE
    page = tl.load(page_ids + first_page + rank // PAGE, mask=is_there, other=0)
    return page.to(tl.int64) * PAGE + rank % PAGE, is_there


@triton.jit
def _shrink_kernel(  # type: ignore[no-untyped-def]
    x,
    a,
    shrunk,
    blocks,
    page_ids,
    num_inputs,
    x_stride,
    a_stride,
    projection_stride,
    token_stride,
    BLOCK_K: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_R: tl.constexpr,
    PAGE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """shrunk[i, t, r] = x[t] . a[i, row of r] for the tokens of one block, one projection and BLOCK_R ranks."""
    block, projection, rank_block = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first_token, num_tokens = tl.load(blocks + block * 4), tl.load(blocks + block * 4 + 1)
    first_page, num_pages = tl.load(blocks + block * 4 + 2), tl.load(blocks + block * 4 + 3)
    if rank_block * BLOCK_R >= num_pages * PAGE:
        return
    token = tl.arange(0, BLOCK_T)
    is_token = token < num_tokens
    token = (first_token + token).to(tl.int64)
    row, is_rank = _rank_rows(page_ids, first_page, num_pages, rank_block, BLOCK_R, PAGE)
    total = tl.zeros((BLOCK_T, BLOCK_R), dtype=tl.float32)
    for start in range(0, num_inputs, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        is_k = k < num_inputs
        left = tl.load(x + token[:, None] * x_stride + k[None, :], mask=is_token[:, None] & is_k[None, :], other=0.0)
        right = tl.load(
            a + projection * a_stride + row[None, :] * num_inputs + k[:, None], mask=is_rank[None, :] & is_k[:, None], other=0.0
        )
        total = tl.dot(left, right, total, input_precision=PRECISION)
    rank = rank_block * BLOCK_R + tl.arange(0, BLOCK_R)
    tl.store(shrunk + projection * projection_stride + token[:, None] * token_stride + rank[None, :], total, mask=is_token[:, None])


@triton.jit
def _expand_kernel(  # type: ignore[no-untyped-def]
    shrunk,
    b,
    y,
    columns,
    blocks,
    page_ids,
    projection_stride,
    token_stride,
    b_stride,
    y_stride,
    BLOCK_C: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_R: tl.constexpr,
    PAGE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """y[t, c] += shrunk[projection of c, t] . b[rows of t's ranks, c] for the tokens of one block and one block of columns."""
    block, column_block = tl.program_id(0), tl.program_id(1)
    first_token, num_tokens = tl.load(blocks + block * 4), tl.load(blocks + block * 4 + 1)
    first_page, num_pages = tl.load(blocks + block * 4 + 2), tl.load(blocks + block * 4 + 3)
    projection, first_column = tl.load(columns + column_block * 3), tl.load(columns + column_block * 3 + 1)
    column = first_column + tl.arange(0, BLOCK_C)
    is_column = column < tl.load(columns + column_block * 3 + 2)
    token = tl.arange(0, BLOCK_T)
    is_token = token < num_tokens
    token = (first_token + token).to(tl.int64)
    is_here = is_token[:, None] & is_column[None, :]
    total = tl.zeros((BLOCK_T, BLOCK_C), dtype=tl.float32)
    for rank_block in range(0, tl.cdiv(num_pages * PAGE, BLOCK_R)):
        row, is_rank = _rank_rows(page_ids, first_page, num_pages, rank_block, BLOCK_R, PAGE)
        rank = rank_block * BLOCK_R + tl.arange(0, BLOCK_R)
        left = tl.load(
            shrunk + projection * projection_stride + token[:, None] * token_stride + rank[None, :],
            mask=is_token[:, None] & is_rank[None, :],
            other=0.0,
        )
        right = tl.load(b + row[:, None] * b_stride + column[None, :], mask=is_rank[:, None] & is_column[None, :], other=0.0)
        total = tl.dot(left.to(right.dtype), right, total, input_precision=PRECISION)
    place = y + token[:, None] * y_stride + column[None, :]
    old = tl.load(place, mask=is_here, other=0.0)
    tl.store(place, (old.to(tl.float32) + total).to(old.dtype), mask=is_here)
