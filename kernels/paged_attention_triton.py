"""Decode attention over the paged cache on a GPU: programs share out a long context, and a second launch joins their results.

Its twin in plain torch is `paged_attention` of paged_attention.py.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from loray.kernels.attention import Scoring
from loray.kernels.attention_triton import FIRST_MAX, attend_tile, cache_rows
from loray.kernels.linked import LINKED, wait_for_earlier
from loray.kernels.paged_kv import PagedKV
from loray.kernels.shared_memory import fitting_keys, shared_bytes

WANTED_PROGRAMS = 264  # two for each of 132 multiprocessors: as many as these hold at once
MIN_SPLIT_TOKENS = 256  # a smaller share saves less time than the second launch takes
MAX_SPLITS = 64  # the second launch holds them all in registers
TILE_BYTES = 16384  # of keys, and as much of values
NUM_STAGES = 5  # of which three fetch block ids: two tiles are under way, and three programs fit into 228 KB of shared memory
TILES_AT_ONCE = 2  # of keys, and of values, in shared memory
STATS_COLUMNS = 16  # behind a partial result: maximum, sum, and room that keeps rows aligned


def num_splits(num_seqs: int, num_kv_heads: int, max_context_len: int) -> int:
    """How many programs share a sequence's context: a power of two, from sizes alone, so that a captured graph stays valid."""
    limit = min(WANTED_PROGRAMS // (num_seqs * num_kv_heads), max_context_len // MIN_SPLIT_TOKENS, MAX_SPLITS)
    return 1 << (max(limit, 1).bit_length() - 1)


def paged_attention(q: Tensor, kv: PagedKV, scoring: Scoring) -> Tensor:
    """softmax(cap(scale * q k)) v of each sequence's last token over its keys in the cache, itself included; zero where it has none.

    q [num_seqs, num_heads, head_dim], rows may lie apart -> the same, contiguous.
    """
    kv_cache, block_table, context_lens, kv_scales = kv
    num_seqs, num_heads, head_dim = q.shape
    block_size, num_kv_heads = kv_cache.shape[1], kv_cache.shape[2] // 2
    assert q.stride(1) == head_dim and q.stride(2) == 1 and kv_cache.is_contiguous(), "heads lie together"
    assert block_table.stride(1) == 1 and context_lens.is_contiguous(), "a sequence's blocks lie together"
    out = torch.empty(num_seqs, num_heads, head_dim, dtype=q.dtype, device=q.device)
    if not num_seqs:
        return out
    splits = num_splits(num_seqs, num_kv_heads, block_table.shape[1] * block_size)
    partials = out
    if splits > 1:
        partials = torch.empty(num_seqs, num_heads, splits, head_dim + STATS_COLUMNS, dtype=torch.float32, device=q.device)
    dims = max(16, triton.next_power_of_2(head_dim))  # tensor cores multiply at least 16
    rows = max(16, triton.next_power_of_2(num_heads // num_kv_heads))  # tensor cores multiply at least 16
    most_keys = min(64, max(16, TILE_BYTES // (dims * kv_cache.element_size())))
    sizes = q.element_size(), kv_cache.element_size()
    _decode_kernel[(num_kv_heads, num_seqs, splits)](
        *(q, kv_cache, block_table, context_lens, kv_scales, partials, q.stride(0), block_table.stride(0), scoring.scale, scoring.cap),
        *(num_heads, num_kv_heads, head_dim, block_size, scoring.window, scoring.cap > 0, splits > 1, STATS_COLUMNS),
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32",  # of float32 alone
        M=rows,
        N=fitting_keys(most_keys, rows, dims, TILES_AT_ONCE, sizes, shared_bytes(q.device)),
        D=dims,
        num_warps=_num_warps(rows * dims),
        num_stages=NUM_STAGES,
        **LINKED,
    )
    if splits > 1:
        _join_kernel[(num_heads, num_seqs)](partials, out, head_dim, STATS_COLUMNS, SPLITS=splits, D=dims, **LINKED)
    return out


def _num_warps(size: int) -> int:
    """size: elements of the queries, which is what the warps share."""
    return 2 if size <= 16 * 128 else 4 if size <= 64 * 128 else 8


# However many blocks a step has, and wherever its prompts begin: nobody waits for another kernel to be compiled.
@triton.jit(do_not_specialize=["table_stride"], do_not_specialize_on_alignment=["block_table", "context_lens"])
def _decode_kernel(  # type: ignore[no-untyped-def]
    q,
    kv_cache,
    block_table,
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
    IS_SPLIT: tl.constexpr,
    STATS: tl.constexpr,
    PRECISION: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    D: tl.constexpr,
):
    """The query heads of one key head over one sequence's share of keys: the result, or with IS_SPLIT acc, maximum and sum."""
    wait_for_earlier()
    kv_head, seq, split = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    GROUP: tl.constexpr = NUM_HEADS // NUM_KV_HEADS
    VALUES_AT: tl.constexpr = NUM_KV_HEADS * HEAD_DIM
    context_len = tl.load(context_lens + seq)
    first = 0
    if WINDOW > 0:
        first = tl.maximum(context_len - WINDOW, 0)
    share = tl.cdiv(tl.cdiv(context_len - first, N), tl.num_programs(2)) * N
    first = first + split * share
    end = tl.minimum(first + share, context_len)

    row, dim = tl.arange(0, M), tl.arange(0, D)
    is_row = row < GROUP
    is_there = is_row[:, None] & (dim < HEAD_DIM)[None, :]
    head = kv_head * GROUP + row
    queries = tl.load(q + seq * q_stride + head[:, None] * HEAD_DIM + dim[None, :], mask=is_there, other=0.0)
    if kv_scales is not None:
        scale = scale * tl.load(kv_scales)
    best = tl.full((M,), FIRST_MAX, tl.float32)
    total = tl.zeros((M,), dtype=tl.float32)
    acc = tl.zeros((M, D), dtype=tl.float32)
    for start in range(first, end, N):
        token = start + tl.arange(0, N)
        is_token = token < end
        place = cache_rows(block_table + seq * table_stride, token, is_token, BLOCK_SIZE)
        keys = kv_cache + place * (2 * VALUES_AT) + kv_head * HEAD_DIM
        best, total, acc = attend_tile(
            queries, keys, is_token, is_token[None, :], best, total, acc, scale, cap, HEAD_DIM, VALUES_AT, HAS_CAP, PRECISION, D
        )
    if kv_scales is not None:
        acc = acc * tl.load(kv_scales + 1)
    out_row = seq * NUM_HEADS + head
    if IS_SPLIT:
        partial = out + (out_row * tl.num_programs(2) + split) * (HEAD_DIM + STATS)
        tl.store(partial + HEAD_DIM, best, mask=is_row)
        tl.store(partial + HEAD_DIM + 1, total, mask=is_row)
        tl.store(partial[:, None] + dim[None, :], acc, mask=is_there & (total != 0.0)[:, None])
    else:
        acc = acc / tl.where(total != 0.0, total, 1.0)[:, None]
        tl.store(out + out_row[:, None] * HEAD_DIM + dim[None, :], acc.to(out.dtype.element_ty), mask=is_there)


@triton.jit
def _join_kernel(  # type: ignore[no-untyped-def]
    partials, out, HEAD_DIM: tl.constexpr, STATS: tl.constexpr, SPLITS: tl.constexpr, D: tl.constexpr
):
    """One head of one sequence: the sum of the shares' acc, each times 2^(its maximum - the largest), over that of their sums."""
    wait_for_earlier()
    head = tl.program_id(1).to(tl.int64) * tl.num_programs(0) + tl.program_id(0)
    split, dim = tl.arange(0, SPLITS), tl.arange(0, D)
    partial = partials + (head * SPLITS + split) * (HEAD_DIM + STATS)
    best, total = tl.load(partial + HEAD_DIM), tl.load(partial + HEAD_DIM + 1)
    is_there = (total != 0.0)[:, None] & (dim < HEAD_DIM)[None, :]  # an empty share has written no acc; NaN shall show
    acc = tl.load(partial[:, None] + dim[None, :], mask=is_there, other=0.0)
    weight = tl.exp2(best - tl.max(best, 0))
    total = tl.sum(weight * total, 0)
    result = tl.sum(weight[:, None] * acc, 0) / tl.where(total != 0.0, total, 1.0)
    tl.store(out + head * HEAD_DIM + dim, result.to(out.dtype.element_ty), mask=dim < HEAD_DIM)
