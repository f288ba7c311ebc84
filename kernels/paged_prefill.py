"""Prefill attention over the paged cache: several queries a sequence, the last of its tokens. On a GPU paged_prefill_triton.py does it."""

import torch
from torch import Tensor

from loray.kernels.attention import Scoring, attend
from loray.kernels.paged_attention import read_cache


def paged_prefill(
    q: Tensor,
    kv_cache: Tensor,
    block_table: Tensor,
    cu_q: Tensor,
    context_lens: Tensor,
    max_q: int,
    scoring: Scoring,
    kv_scales: Tensor | None = None,
) -> Tensor:
    """softmax(cap(scale * q k)) v of each query over its sequence's keys in the cache up to itself.

    q [num_tokens, num_heads, head_dim], rows may lie apart -> the same, contiguous; those from cu_q[-1] on are left as they come;
    cu_q [num_seqs + 1] int32, where each sequence's queries begin; max_q, the most queries of a sequence (or more);
    context_lens [num_seqs] int32, this step's queries included; the rest as in paged_attention.py.
    """
    if q.is_cuda:
        from loray.kernels import paged_prefill_triton  # needs Triton, which a machine without a GPU may lack

        return paged_prefill_triton.paged_prefill(q, kv_cache, block_table, cu_q, context_lens, max_q, scoring, kv_scales)
    out = torch.empty(q.shape, dtype=q.dtype)
    ends = cu_q.tolist()
    for seq, context_len in enumerate(context_lens.tolist()):
        queries = slice(ends[seq], ends[seq + 1])
        keys, values = read_cache(kv_cache, block_table[seq], context_len, kv_scales)
        out[queries] = attend(q[queries], keys, values, scoring)
    return out
