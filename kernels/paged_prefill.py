"""Prefill attention over the paged cache: several queries a sequence, the last of its tokens. On a GPU paged_prefill_triton.py does it."""

import torch
from torch import Tensor

from loray.kernels.attention import PromptWork, Scoring, attend
from loray.kernels.paged_kv import PagedKV


def paged_prefill(q: Tensor, kv: PagedKV, prompts: PromptWork, scoring: Scoring) -> Tensor:
    """softmax(cap(scale * q k)) v of each query over its sequence's keys in the cache up to itself.

    q [num_tokens, num_heads, head_dim], rows may lie apart -> the same, contiguous; those behind the last prompt's are left as they come.
    """
    if q.is_cuda:
        from loray.kernels import paged_prefill_triton  # needs Triton, which a machine without a GPU may lack

        return paged_prefill_triton.paged_prefill(q, kv, prompts, scoring)
    out = torch.empty(q.shape, dtype=q.dtype)
    firsts = prompts.first_queries.tolist()
    for seq, (keys, values) in enumerate(kv.sequences()):
        queries = slice(firsts[seq], firsts[seq + 1])
        out[queries] = attend(q[queries], keys, values, scoring)
    return out
