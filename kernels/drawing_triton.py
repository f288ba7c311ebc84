"""Draws a token of each row on a GPU, one program a row. Its twin in plain torch is drawing.py.

Nothing is put in order. The largest of score + noise among all tokens is drawn; where it is none of those that top-k and top-p leave,
nor is any token with a lower score, and the largest among the rest is drawn, until one may stay: it is the largest among those that are
left, which is what the twin takes. Each time about half of the mass beyond the limits falls away.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK, NUM_WARPS = 8192, 16  # tokens that a program looks at together


def draw(scores: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, keys: Tensor) -> Tensor:
    """[num_rows] int64, as drawing.py's."""
    num_rows, vocab_size = scores.shape
    assert scores.stride(1) == 1 and keys.is_contiguous(), "rows are contiguous"
    tokens = torch.empty(num_rows, dtype=torch.int64, device=scores.device)
    if num_rows:
        block = min(BLOCK, triton.next_power_of_2(vocab_size))
        arguments = scores, temperature, top_k, top_p, keys, tokens, scores.stride(0), vocab_size
        _draw_kernel[(num_rows,)](*arguments, BLOCK=block, num_warps=NUM_WARPS)
    return tokens


@triton.jit
def _draw_kernel(  # type: ignore[no-untyped-def]
    scores, temperatures, top_ks, top_ps, keys, tokens, stride, vocab_size, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    scores += row * stride
    factor = 1.0 / tl.load(temperatures + row)
    top_k, top_p = tl.load(top_ks + row), tl.load(top_ps + row)
    first_key, second_key = tl.load(keys + 2 * row).to(tl.uint32, bitcast=True), tl.load(keys + 2 * row + 1).to(tl.uint32, bitcast=True)
    max_count = tl.where((top_k > 0) & (top_k < vocab_size), top_k, vocab_size).to(tl.int32)
    max_mass = tl.full((), 0.0, tl.float32)  # with top-p: tokens with larger scores have less
    top, least = tl.full((), 0.0, tl.float32), tl.full((), float("-inf"), tl.float32)
    if top_p < 1.0:
        top = _largest(scores, vocab_size, factor, BLOCK)
        top = tl.where(top == float("-inf"), 0.0, top)  # -inf - -inf would be NaN
        if max_count < vocab_size:
            least = _score_of_place(scores, vocab_size, factor, top, max_count, BLOCK)
        count, mass = _above(scores, vocab_size, factor, top, least, BLOCK)
        max_mass = top_p * (mass + (max_count - count).to(tl.float32) * tl.exp(least - top))
    # what lies below `least` is never looked at, what equals it is
    token, score, count, mass = _best(scores, vocab_size, factor, top, least, True, first_key, second_key, BLOCK)
    is_limited = (max_count < vocab_size) | (top_p < 1.0)
    while is_limited:
        other, other_score, count, mass = _best(scores, vocab_size, factor, top, score, False, first_key, second_key, BLOCK)
        is_limited = (count > 0) & ((count >= max_count) | ((top_p < 1.0) & (mass >= max_mass)))  # without top-p the mass may be infinite
        token = tl.where(is_limited, other, token)
        score = tl.where(is_limited, other_score, score)
    tl.store(tokens + row, token.to(tl.int64))


@triton.jit
def _best(  # type: ignore[no-untyped-def]
    scores, vocab_size, factor, top, bound, with_bound: tl.constexpr, first_key, second_key, BLOCK: tl.constexpr
):
    """Of the tokens with scores above the bound (or at it): the first with the largest score + noise, its score, how many there are, and
    the sum of exp(score - top). Token 0 where there are none."""
    best, score = tl.full((), float("-inf"), tl.float32), tl.full((), float("-inf"), tl.float32)
    token = tl.full((), 0, tl.int32)
    counts, masses = tl.zeros([BLOCK], tl.int32), tl.zeros([BLOCK], tl.float32)
    for start in range(0, vocab_size, BLOCK):
        place = start + tl.arange(0, BLOCK)
        x = _scaled(scores, place, vocab_size, factor)
        is_in = (x >= bound) if with_bound else (x > bound)
        counts += is_in.to(tl.int32)
        masses += tl.where(is_in, tl.exp(x - top), 0.0)
        noisy = tl.where(is_in, x + _noise(place, first_key, second_key), float("-inf"))
        largest = tl.max(noisy, 0)
        if largest > best:
            best = largest
            token = tl.min(tl.where(noisy == largest, place, vocab_size), 0)
    if best > float("-inf"):
        score = tl.load(scores + token).to(tl.float32) * factor
    return token, score, tl.sum(counts, 0), tl.sum(masses, 0)


@triton.jit
def _above(scores, vocab_size, factor, top, bound, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """How many tokens have scores above the bound, and the sum of their exp(score - top)."""
    counts, masses = tl.zeros([BLOCK], tl.int32), tl.zeros([BLOCK], tl.float32)
    for start in range(0, vocab_size, BLOCK):
        x = _scaled(scores, start + tl.arange(0, BLOCK), vocab_size, factor)
        counts += (x > bound).to(tl.int32)
        masses += tl.where(x > bound, tl.exp(x - top), 0.0)
    return tl.sum(counts, 0), tl.sum(masses, 0)


@triton.jit
def _largest(scores, vocab_size, factor, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    largest = tl.full([BLOCK], float("-inf"), tl.float32)
    for start in range(0, vocab_size, BLOCK):
        largest = tl.maximum(largest, _scaled(scores, start + tl.arange(0, BLOCK), vocab_size, factor))
    return tl.max(largest, 0)


@triton.jit
def _score_of_place(scores, vocab_size, factor, top, place, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """The least score that fewer than `place` others exceed, found by halving what it can be: the integers that order as numbers do."""
    low, high = tl.full((), -2139095042, tl.int64), _ordinal(top).to(tl.int64)  # below minus infinity's; the largest score's
    while high - low > 1:
        middle = (low + high) >> 1
        bound = _number(middle.to(tl.int32))
        counts = tl.zeros([BLOCK], tl.int32)
        for start in range(0, vocab_size, BLOCK):
            counts += (_scaled(scores, start + tl.arange(0, BLOCK), vocab_size, factor) > bound).to(tl.int32)
        is_high = tl.sum(counts, 0) < place
        high = tl.where(is_high, middle, high)
        low = tl.where(is_high, low, middle)
    return _number(high.to(tl.int32))


@triton.jit
def _ordinal(x):  # type: ignore[no-untyped-def]
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _number(ordinal):  # type: ignore[no-untyped-def]
    return (ordinal ^ ((ordinal >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _scaled(scores, place, vocab_size, factor):  # type: ignore[no-untyped-def]
    """NaN counts as minus infinity."""
    x = tl.load(scores + place, mask=place < vocab_size, other=float("-inf")).to(tl.float32) * factor
    return tl.where(x == x, x, float("-inf"))


@triton.jit
def _noise(place, first_key, second_key):  # type: ignore[no-untyped-def]
    """noise.py's gumbel_noise"""
    bits = _mix(_mix(_mix(place.to(tl.uint32)) ^ first_key) + second_key)
    uniform = ((bits >> 9).to(tl.float32) + 0.5) * (1.0 / 8388608.0)
    return -tl.log(-tl.log(uniform))


@triton.jit
def _mix(x):  # type: ignore[no-untyped-def]
    x = (x ^ (x >> 16)) * 0x85EBCA6B
    x = (x ^ (x >> 13)) * 0xC2B2AE35
    return x ^ (x >> 16)
