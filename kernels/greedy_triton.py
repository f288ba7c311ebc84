"""The most probable token of each row on a GPU: two launches, over chunks of the vocabulary and over what those found.

Its twin in plain torch is greedy.py.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from loray.kernels.linked import LINKED, wait_for_earlier

CHUNK, NUM_WARPS = 4096, 8  # tokens of a program: a vocabulary of 128256 is 32 programs a row, so that few rows too fill the GPU


def greedy(logits: Tensor) -> tuple[Tensor, Tensor]:
    """argmax(logits), the lowest id among equals, [num_rows] int64; log_softmax(logits) at it, [num_rows] float32.

    logits [num_rows, vocab_size]. NaN counts as minus infinity for the argmax. Where there is no distribution, the log-probability is NaN.
    """
    tokens, logprobs, _ = _reduce(logits)
    return tokens, logprobs


def most_and_total(logits: Tensor) -> tuple[Tensor, Tensor]:
    """argmax(logits), int64, and logsumexp(logits), float32, [num_rows] each."""
    tokens, _, totals = _reduce(logits)
    return tokens, totals


def _reduce(logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    num_rows, vocab_size = logits.shape
    assert logits.stride(1) == 1, "rows are contiguous"
    num_chunks = triton.cdiv(vocab_size, CHUNK)
    found = torch.empty(2, num_rows, num_chunks, dtype=torch.float32, device=logits.device)  # largest, sum of exp(x - largest)
    found_ids = torch.empty(num_rows, num_chunks, dtype=torch.int32, device=logits.device)
    tokens = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    logprobs, totals = torch.empty(2, num_rows, dtype=torch.float32, device=logits.device)
    _chunk_kernel[(num_rows, num_chunks)](
        *(logits, found[0], found[1], found_ids, logits.stride(0), vocab_size),
        BLOCK_C=CHUNK,
        num_warps=NUM_WARPS,
        **LINKED,
    )
    _row_kernel[(num_rows,)](
        *(found[0], found[1], found_ids, tokens, logprobs, totals, num_chunks),
        BLOCK_C=triton.next_power_of_2(num_chunks),
        num_warps=1,
        **LINKED,
    )
    return tokens, logprobs, totals


@triton.jit
def _chunk_kernel(  # type: ignore[no-untyped-def]
    logits, largest, exp_sums, ids, stride, vocab_size, BLOCK_C: tl.constexpr
):
    """Of one chunk of a row: its largest number, the first id that has it, and the sum of exp(x - largest)."""
    wait_for_earlier()
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = chunk * BLOCK_C + tl.arange(0, BLOCK_C)
    is_token = token < vocab_size
    x = tl.load(logits + row * stride + token, mask=is_token, other=float("-inf")).to(tl.float32)
    comparable = tl.where(x == x, x, float("-inf"))
    top = tl.max(comparable, 0)
    best = tl.min(tl.where(is_token & (comparable == top), token, vocab_size), 0)
    base = tl.where(top == float("-inf"), 0.0, top)  # -inf - -inf would be NaN; a NaN of the row stays in the sum
    place = row * tl.num_programs(1) + chunk
    tl.store(largest + place, top)
    tl.store(exp_sums + place, tl.sum(tl.exp(x - base), 0))
    tl.store(ids + place, best)


@triton.jit
def _row_kernel(  # type: ignore[no-untyped-def]
    largest, exp_sums, ids, tokens, logprobs, totals, num_chunks, BLOCK_C: tl.constexpr
):
    """Of one row: the first of its chunks' ids with the largest number, -log(sum of exp(x - largest)), and log(sum of exp(x))."""
    wait_for_earlier()
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.arange(0, BLOCK_C)
    is_chunk = chunk < num_chunks
    place = row * num_chunks + chunk
    tops = tl.load(largest + place, mask=is_chunk, other=float("-inf"))
    exp_sum = tl.load(exp_sums + place, mask=is_chunk, other=0.0)
    top = tl.max(tops, 0)
    found = tl.load(ids + place, mask=is_chunk, other=2147483647)
    best = tl.min(tl.where(is_chunk & (tops == top), found, 2147483647), 0)
    base = tl.where(top == float("-inf"), 0.0, top)
    logprob = -tl.log(tl.sum(exp_sum * tl.exp(tops - base), 0))
    tl.store(tokens + row, best.to(tl.int64))
    tl.store(logprobs + row, tl.where(top > float("-inf"), logprob, float("nan")))
    tl.store(totals + row, base - logprob)
