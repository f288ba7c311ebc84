"""Low-rank updates of a linear layer's output on a GPU, each token with its own adapter: two launches, whatever adapters there are.

Its twin in plain torch is `add_lora` of lora.py, over groups instead.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from loray.kernels.linked import LINKED, wait_for_earlier
from loray.kernels.lora import SHORT_BLOCK, LoraPages, LoraSegments

RANKS_AT_ONCE = 16  # the least that tensor cores multiply; an odd number of pages is padded with nothing
MAX_RANK_PROGRAMS = 2  # of one block and projection; where an adapter has more ranks, each takes several
INPUTS_AT_ONCE = 256
COLUMNS_AT_ONCE = 256
# Few tokens leave most of the GPU idle and each program waiting for memory, so several share the inputs.
MIN_SPLIT_INPUTS, MAX_SPLITS = 1024, 8
SHORT_WARPS, LONG_WARPS = 2, 4  # of a program, by the tokens of its block
MAX_PROJECTIONS = 3


def add_lora_segments(y: Tensor, x: Tensor, pages: LoraPages, segments: LoraSegments) -> None:
    """y[t, columns of i] += (x[t] @ a[i, ranks of t].T) @ b[ranks of t, columns of i] for each token t and each fused projection i.

    x [num_tokens, in], y [num_tokens, sum(widths)], in place.
    """
    if pages.a.shape[2] and len(segments.blocks):
        _expand(y, shrink(x, pages.a, segments), pages, segments, is_added=True)


def lora_update(x: Tensor, pages: LoraPages, segments: LoraSegments) -> Tensor:
    """[num_tokens, sum(widths)]: what add_lora_segments would add to the tokens of the blocks; anything at the others."""
    update = torch.empty(len(x), pages.b.shape[1], dtype=x.dtype, device=x.device)
    _expand(update, shrink(x, pages.a, segments), pages, segments, is_added=False)
    return update


def shrink(x: Tensor, a: Tensor, segments: LoraSegments) -> Tensor:
    """[splits, projections, num_tokens, ranks] float32: x a^T, in parts over the inputs that are still to be summed."""
    num_projections, _, num_inputs = a.shape
    assert x.stride(1) == 1 and a.is_contiguous(), "rows are contiguous"
    num_rank_blocks = triton.cdiv(segments.max_pages * segments.page_rank, RANKS_AT_ONCE)
    is_short = segments.block_tokens == SHORT_BLOCK
    num_splits = max(1, min(MAX_SPLITS, num_inputs // MIN_SPLIT_INPUTS)) if is_short else 1
    num_ranks = num_rank_blocks * RANKS_AT_ONCE
    shrunk = torch.empty(num_splits, num_projections, len(x), num_ranks, dtype=torch.float32, device=x.device)
    grid = (len(segments.blocks), num_projections * num_splits, min(num_rank_blocks, MAX_RANK_PROGRAMS))
    _shrink_kernel[grid](
        *(x, a, shrunk, segments.blocks, segments.page_ids, num_inputs, num_projections),
        *(x.stride(0), a.stride(0), shrunk.stride(1), shrunk.stride(2)),
        BLOCK_K=INPUTS_AT_ONCE if is_short else INPUTS_AT_ONCE // 2,
        SPLIT_K=triton.cdiv(triton.cdiv(num_inputs, num_splits), INPUTS_AT_ONCE) * INPUTS_AT_ONCE,
        RANK_PROGRAMS=grid[2],
        **shape(x, segments),
    )
    return shrunk


def _expand(y: Tensor, shrunk: Tensor, pages: LoraPages, segments: LoraSegments, is_added: bool) -> None:
    b, widths = pages.b, pages.widths
    assert y.stride(1) == 1 and b.is_contiguous() and len(widths) <= MAX_PROJECTIONS, "rows are contiguous"
    num_tiles = sum(triton.cdiv(width, COLUMNS_AT_ONCE) for width in widths)
    _expand_kernel[(len(segments.blocks), num_tiles)](
        *(shrunk, b, y, segments.blocks, segments.page_ids),
        *(*widths, *([0] * (MAX_PROJECTIONS - len(widths)))),
        *(*shrunk.stride()[:3], b.stride(0), y.stride(0)),
        BLOCK_C=COLUMNS_AT_ONCE,
        NUM_SPLITS=len(shrunk),
        IS_ADDED=is_added,
        **shape(y, segments),
    )


def shape(x: Tensor, segments: LoraSegments) -> dict[str, Any]:
    return {
        "BLOCK_T": segments.block_tokens,
        "BLOCK_R": RANKS_AT_ONCE,
        "PAGE": segments.page_rank,
        "PRECISION": "ieee" if x.dtype == torch.float32 else "tf32",  # of float32 alone
        "num_warps": SHORT_WARPS if segments.block_tokens == SHORT_BLOCK else LONG_WARPS,
        **LINKED,
    }


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
    num_projections,
    x_stride,
    a_stride,
    part_stride,
    token_stride,
    BLOCK_K: tl.constexpr,
    SPLIT_K: tl.constexpr,
    RANK_PROGRAMS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_R: tl.constexpr,
    PAGE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """shrunk[split, i, t, r] = x[t] . a[i, row of r] over the split's inputs, for the tokens of one block and every RANK_PROGRAMS-th
    BLOCK_R ranks."""
    wait_for_earlier()
    block, part = tl.program_id(0), tl.program_id(1)
    split, projection = part // num_projections, (part % num_projections).to(tl.int64)
    first_token, num_tokens = tl.load(blocks + block * 4), tl.load(blocks + block * 4 + 1)
    first_page, num_pages = tl.load(blocks + block * 4 + 2), tl.load(blocks + block * 4 + 3)
    if num_tokens == 0:
        return
    token = tl.arange(0, BLOCK_T)
    is_token = token < num_tokens
    token = (first_token + token).to(tl.int64)
    first_k = split * SPLIT_K
    end_k = tl.minimum(first_k + SPLIT_K, num_inputs)
    for rank_block in range(tl.program_id(2), tl.cdiv(num_pages * PAGE, BLOCK_R), RANK_PROGRAMS):
        row, is_rank = _rank_rows(page_ids, first_page, num_pages, rank_block, BLOCK_R, PAGE)
        total = tl.zeros((BLOCK_T, BLOCK_R), dtype=tl.float32)
        for start in range(first_k, end_k, BLOCK_K):
            k = start + tl.arange(0, BLOCK_K)
            is_k = k < end_k
            left = tl.load(x + token[:, None] * x_stride + k[None, :], mask=is_token[:, None] & is_k[None, :], other=0.0)
            right = tl.load(
                a + projection * a_stride + row[None, :] * num_inputs + k[:, None], mask=is_rank[None, :] & is_k[:, None], other=0.0
            )
            total = tl.dot(left, right, total, input_precision=PRECISION)
        rank = rank_block * BLOCK_R + tl.arange(0, BLOCK_R)
        tl.store(shrunk + part * part_stride + token[:, None] * token_stride + rank[None, :], total, mask=is_token[:, None])


@triton.jit
def update_of(  # type: ignore[no-untyped-def]
    shrunk,
    b,
    page_ids,
    first_page,
    num_pages,
    token,
    is_token,
    column,
    is_column,
    split_stride,
    token_stride,
    b_stride,
    NUM_SPLITS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
    PAGE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """[BLOCK_T, BLOCK_C] float32: what LoRA adds to these tokens' columns. shrunk: of the columns' projection."""
    total = tl.zeros((BLOCK_T, BLOCK_C), dtype=tl.float32)
    for rank_block in range(0, tl.cdiv(num_pages * PAGE, BLOCK_R)):
        row, is_rank = _rank_rows(page_ids, first_page, num_pages, rank_block, BLOCK_R, PAGE)
        rank = rank_block * BLOCK_R + tl.arange(0, BLOCK_R)
        left = tl.zeros((BLOCK_T, BLOCK_R), dtype=tl.float32)
        for split in tl.static_range(NUM_SPLITS):
            left += tl.load(
                shrunk + split * split_stride + token[:, None] * token_stride + rank[None, :],
                mask=is_token[:, None] & is_rank[None, :],
                other=0.0,
            )
        right = tl.load(b + row[:, None] * b_stride + column[None, :], mask=is_rank[:, None] & is_column[None, :], other=0.0)
        total = tl.dot(left.to(right.dtype), right, total, input_precision=PRECISION)
    return total


@triton.jit
def _expand_kernel(  # type: ignore[no-untyped-def]
    shrunk,
    b,
    y,
    blocks,
    page_ids,
    width_0,
    width_1,
    width_2,
    split_stride,
    projection_stride,
    token_stride,
    b_stride,
    y_stride,
    BLOCK_C: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    IS_ADDED: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_R: tl.constexpr,
    PAGE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """y[t, c] (+)= shrunk[projection of c, t] . b[rows of t's ranks, c] for the tokens of one block and BLOCK_C columns of a projection."""
    wait_for_earlier()
    block, tile = tl.program_id(0), tl.program_id(1)
    first_token, num_tokens = tl.load(blocks + block * 4), tl.load(blocks + block * 4 + 1)
    first_page, num_pages = tl.load(blocks + block * 4 + 2), tl.load(blocks + block * 4 + 3)
    if num_tokens * num_pages == 0:
        return
    projection, first_column, end = 0, tile * BLOCK_C, width_0
    if tile >= tl.cdiv(width_0, BLOCK_C):
        tile -= tl.cdiv(width_0, BLOCK_C)
        projection, first_column, end = 1, width_0 + tile * BLOCK_C, width_0 + width_1
        if tile >= tl.cdiv(width_1, BLOCK_C):
            tile -= tl.cdiv(width_1, BLOCK_C)
            projection, first_column, end = 2, width_0 + width_1 + tile * BLOCK_C, width_0 + width_1 + width_2
    column = first_column + tl.arange(0, BLOCK_C)
    is_column = column < end
    token = tl.arange(0, BLOCK_T)
    is_token = token < num_tokens
    token = (first_token + token).to(tl.int64)
    is_here = is_token[:, None] & is_column[None, :]
    shrunk += projection * projection_stride
    total = update_of(
        shrunk, b, page_ids, first_page, num_pages, token, is_token, column, is_column, split_stride, token_stride, b_stride,
        NUM_SPLITS, BLOCK_T, BLOCK_R, BLOCK_C, PAGE, PRECISION,
    )  # fmt: skip
    place = y + token[:, None] * y_stride + column[None, :]
    if IS_ADDED:
        total += tl.load(place, mask=is_here, other=0.0).to(tl.float32)
    tl.store(place, total.to(y.dtype.element_ty), mask=is_here)
