"""The gate of a gated MLP over low-rank updates that are not in its input yet, on a GPU: they are added where the input is read anyway.

For prompts: an update that is written and read again costs more than its products. The twin: `add_lora`, then `gate`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from loray.kernels.activation_triton import activated
from loray.kernels.linked import wait_for_earlier
from loray.kernels.lora import LONG_BLOCK, LoraPages, LoraSegments
from loray.kernels.lora_segments import shape, shrink, update_of

COLUMNS_AT_ONCE, NUM_WARPS = 128, 4
NUM_PROGRAMS = 1024  # at least, where there is so much work: each takes several tiles of columns, and looks its ranks up once


def gate_updated(name: str, y: Tensor, x: Tensor, pages: LoraPages, segments: LoraSegments) -> Tensor:
    """act(gate) * up of y + what LoRA adds to it, of x: [num_tokens, 2 * intermediate], [num_tokens, in] -> [num_tokens, intermediate].

    The segments' blocks have every token.
    """
    assert segments.block_tokens == LONG_BLOCK and y.stride(1) == 1 and pages.b.is_contiguous()
    shrunk = shrink(x, pages.a, segments)
    size = y.shape[1] // 2
    out = torch.empty(len(y), size, dtype=y.dtype, device=y.device)
    num_programs = min(triton.cdiv(size, COLUMNS_AT_ONCE), triton.cdiv(NUM_PROGRAMS, len(segments.blocks)))
    _gate_updated_kernel[(len(segments.blocks), num_programs)](
        *(shrunk, pages.b, y, out, segments.blocks, segments.page_ids),
        *(size, *shrunk.stride()[:3], pages.b.stride(0), y.stride(0)),
        NAME=name,
        UP_PROJECTION=len(pages.widths) - 1,
        BLOCK_C=COLUMNS_AT_ONCE,
        **shape(y, segments) | {"num_warps": NUM_WARPS},
    )
    return out


@triton.jit
def _gate_updated_kernel(  # type: ignore[no-untyped-def]
    shrunk,
    b,
    y,
    out,
    blocks,
    page_ids,
    size,
    split_stride,
    projection_stride,
    token_stride,
    b_stride,
    y_stride,
    NAME: tl.constexpr,
    UP_PROJECTION: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_R: tl.constexpr,
    PAGE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """out[t, c] = act(gate) * up for the tokens of one block and every so many-th BLOCK_C columns as there are programs of the block."""
    wait_for_earlier()
    block = tl.program_id(0)
    first_token, num_tokens = tl.load(blocks + block * 4), tl.load(blocks + block * 4 + 1)
    first_page, num_pages = tl.load(blocks + block * 4 + 2), tl.load(blocks + block * 4 + 3)
    token = tl.arange(0, BLOCK_T)
    is_token = token < num_tokens
    token = (first_token + token).to(tl.int64)
    for first_column in range(tl.program_id(1) * BLOCK_C, size, tl.num_programs(1) * BLOCK_C):
        column = first_column + tl.arange(0, BLOCK_C)
        is_column = column < size
        is_here = is_token[:, None] & is_column[None, :]
        place = y + token[:, None] * y_stride + column[None, :]
        gated, up = tl.load(place, mask=is_here, other=0.0), tl.load(place + size, mask=is_here, other=0.0)
        added = update_of(
            shrunk, b, page_ids, first_page, num_pages, token, is_token, column, is_column, split_stride, token_stride, b_stride,
            1, BLOCK_T, BLOCK_R, BLOCK_C, PAGE, PRECISION,
        )  # fmt: skip
        gated = (gated.to(tl.float32) + added).to(y.dtype.element_ty)
        added = update_of(
            shrunk + UP_PROJECTION * projection_stride,
            b + size, page_ids, first_page, num_pages, token, is_token, column, is_column, split_stride, token_stride, b_stride,
            1, BLOCK_T, BLOCK_R, BLOCK_C, PAGE, PRECISION,
        )  # fmt: skip
        up = (up.to(tl.float32) + added).to(y.dtype.element_ty)
        gated = activated(gated.to(tl.float32), NAME).to(out.dtype.element_ty)
        product = gated.to(tl.float32) * up.to(tl.float32)
        tl.store(out + token[:, None] * size + column[None, :], product.to(out.dtype.element_ty), mask=is_here)
