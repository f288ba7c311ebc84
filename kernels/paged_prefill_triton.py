"""Prefill attention over the paged cache on a GPU, whatever the dtype, head size, window and cap: nothing is gathered first.

Its twin in plain torch is `paged_prefill` of paged_prefill.py.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from loray.kernels.attention import PromptWork, Scoring
from loray.kernels.attention_triton import FIRST_MAX, attend_tile, cache_rows
from loray.kernels.paged_kv import PagedKV
from loray.kernels.shared_memory import fitting_keys, shared_bytes

MAX_DIMS = 512
TILES_AT_ONCE = 1  # of keys, and of values, in shared memory


def _tile(head_dims: int, is_float32: bool) -> tuple[int, int, int]:
    """Queries times heads, keys at most, and warps of one program: the largest whose sums stay in registers, compiled for sm_90."""
    if is_float32:  # multiplied without tensor cores, and twice as wide
        return (32, 32, 8) if head_dims <= 128 else (32, 16, 8) if head_dims <= 256 else (16, 16, 8)
    return (128, 64, 8) if head_dims <= 128 else (64, 64, 8) if head_dims <= 256 else (32, 32, 8)


def paged_prefill(q: Tensor, kv: PagedKV, prompts: PromptWork, scoring: Scoring) -> Tensor:
    """softmax(cap(scale * q k)) v of each query over its sequence's keys in the cache up to itself.

    q [num_tokens, num_heads, head_dim], rows may lie apart -> the same, contiguous; the rest as in paged_prefill.py.
    """
    kv_cache, block_table, context_lens, kv_scales = kv
    cu_q = prompts.first_queries
    num_tokens, num_heads, head_dim = q.shape
    block_size, num_kv_heads = kv_cache.shape[1], kv_cache.shape[2] // 2
    assert q.stride(1) == head_dim and q.stride(2) == 1 and kv_cache.is_contiguous(), "heads lie together"
    assert block_table.stride(1) == 1 and cu_q.is_contiguous() and context_lens.is_contiguous(), "a sequence's blocks lie together"
    out = torch.empty(num_tokens, num_heads, head_dim, dtype=q.dtype, device=q.device)
    if not num_tokens:
        return out
    dims = max(16, triton.next_power_of_2(head_dim))  # tensor cores multiply at least 16
    assert dims <= MAX_DIMS, "a head's sums fit into registers"
    rows, most_keys, num_warps = _tile(dims, q.dtype == torch.float32)
    sizes = q.element_size(), kv_cache.element_size()
    num_tiles = triton.cdiv(prompts.longest * (num_heads // num_kv_heads), rows)
    _prefill_kernel[(num_tiles, num_kv_heads, len(context_lens))](
        *(q, kv_cache, block_table, cu_q, context_lens, kv_scales, out, q.stride(0), block_table.stride(0), scoring.scale, scoring.cap),
        *(num_heads, num_kv_heads, head_dim, block_size, scoring.window, scoring.cap > 0),
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32",  # of float32 alone
        M=rows,
        N=fitting_keys(most_keys, rows, dims, TILES_AT_ONCE, sizes, shared_bytes(q.device)),
        D=dims,
        num_warps=num_warps,
        num_stages=3,  # the first fetches block ids
    )
    return out


# However many blocks a step has, and wherever its prompts begin: nobody waits for another kernel to be compiled.
@triton.jit(do_not_specialize=["table_stride"], do_not_specialize_on_alignment=["block_table", "cu_q", "context_lens"])
def _prefill_kernel(  # type: ignore[no-untyped-def]
    q,
    kv_cache,
    block_table,
    cu_q,
    context_lens,
    kv_scales,
    out,
    q_stride,
    table_stride,
    scale,
    cap,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_CAP: tl.constexpr,
    PRECISION: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    D: tl.constexpr,
):
    """M rows, each one query of one of the heads that share a key head; a query's heads are neighbours."""
    kv_head, seq = tl.program_id(1), tl.program_id(2).to(tl.int64)
    tile = tl.num_programs(0) - 1 - tl.program_id(0)  # the last queries see the most keys: they start first
    GROUP: tl.constexpr = NUM_HEADS // NUM_KV_HEADS
    VALUES_AT: tl.constexpr = NUM_KV_HEADS * HEAD_DIM
    first_q, end_q = tl.load(cu_q + seq), tl.load(cu_q + seq + 1)
    num_rows = (end_q - first_q) * GROUP
    if tile * M >= num_rows:
        return
    row, dim = tile * M + tl.arange(0, M), tl.arange(0, D)
    is_there = (row < num_rows)[:, None] & (dim < HEAD_DIM)[None, :]
    token, head = (first_q + row // GROUP).to(tl.int64), kv_head * GROUP + row % GROUP
    queries = tl.load(q + token[:, None] * q_stride + head[:, None] * HEAD_DIM + dim[None, :], mask=is_there, other=0.0)

    before = tl.load(context_lens + seq) - (end_q - first_q)  # keys of earlier steps
    position = before + row // GROUP
    first = 0
    if WINDOW > 0:
        first = tl.maximum(before + (tile * M) // GROUP - WINDOW + 1, 0)
    end = before + (tl.minimum(tile * M + M, num_rows) - 1) // GROUP + 1
    if kv_scales is not None:
        scale = scale * tl.load(kv_scales)
    best = tl.full((M,), FIRST_MAX, tl.float32)
    total = tl.zeros((M,), dtype=tl.float32)
    acc = tl.zeros((M, D), dtype=tl.float32)
    for start in range(first, end, N):
        key = start + tl.arange(0, N)
        is_key = key < end
        is_seen = is_key[None, :] & (key[None, :] <= position[:, None])
        if WINDOW > 0:
            is_seen = is_seen & (key[None, :] > position[:, None] - WINDOW)
        place = cache_rows(block_table + seq * table_stride, key, is_key, BLOCK_SIZE)
        keys = kv_cache + place * (2 * VALUES_AT) + kv_head * HEAD_DIM
        best, total, acc = attend_tile(
            queries, keys, is_key, is_seen, best, total, acc, scale, cap, HEAD_DIM, VALUES_AT, HAS_CAP, PRECISION, D
        )
    acc = acc / tl.where(total != 0.0, total, 1.0)[:, None]
    if kv_scales is not None:
        acc = acc * tl.load(kv_scales + 1)
    tl.store(out + (token * NUM_HEADS + head)[:, None] * HEAD_DIM + dim[None, :], acc.to(out.dtype.element_ty), mask=is_there)
