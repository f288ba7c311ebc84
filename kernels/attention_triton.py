"""One step of attention on a GPU: some queries meet a tile of keys and values of the paged cache. Launches nothing."""

import triton
import triton.language as tl

FIRST_MAX = tl.constexpr(-1e30)  # below every score, yet finite: a row that has seen no key yet subtracts it without making NaN
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def cache_rows(block_table, token, is_token, BLOCK_SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Where a sequence's tokens lie, counted in tokens from the start of the cache; `block_table` points to its row."""
    block = tl.load(block_table + token // BLOCK_SIZE, mask=is_token, other=0)
    return block.to(tl.int64) * BLOCK_SIZE + token % BLOCK_SIZE


@triton.jit
def attend_tile(  # type: ignore[no-untyped-def]
    q,
    keys,
    is_key,
    is_seen,
    best,
    total,
    acc,
    scale,
    cap,
    HEAD_DIM: tl.constexpr,
    VALUES_AT: tl.constexpr,
    HAS_CAP: tl.constexpr,
    PRECISION: tl.constexpr,
    D: tl.constexpr,
):
    """The running softmax of queries [M, D] over one more tile of N keys: new (best, total, acc); best counts in units of log 2.

    keys [N] pointers to each key; its value lies VALUES_AT further. is_key [N] = may be read, is_seen [M, N] = counts.
    """
    dim = tl.arange(0, D)
    is_there = is_key[:, None] & (dim < HEAD_DIM)[None, :]
    k = tl.load(keys[:, None] + dim[None, :], mask=is_there, other=0.0)
    v = tl.load(keys[:, None] + (VALUES_AT + dim)[None, :], mask=is_there, other=0.0)
    scores = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision=PRECISION)
    scores = scores * scale
    if HAS_CAP:  # tanh(x) = 1 - 2 / (e^2x + 1), right at both ends too
        scores = cap * (1.0 - 2.0 / (tl.exp(scores * (2.0 / cap)) + 1.0))
    scores = tl.where(is_seen, scores * LOG2_E, float("-inf"))
    new_best = tl.maximum(best, tl.max(scores, 1))
    weights = tl.exp2(scores - new_best[:, None])
    shrink = tl.exp2(best - new_best)
    total = total * shrink + tl.sum(weights, 1)
    acc = tl.dot(weights.to(q.dtype), v.to(q.dtype), acc * shrink[:, None], input_precision=PRECISION)
    return new_best, total, acc
