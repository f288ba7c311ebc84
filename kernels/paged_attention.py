"""Decode attention over the paged cache: one query a sequence. Plain torch here; on a GPU paged_attention_triton.py does it."""

import torch
from torch import Tensor

from loray.kernels.attention import Scoring, attend


def paged_attention(
    q: Tensor, kv_cache: Tensor, block_table: Tensor, context_lens: Tensor, scoring: Scoring, kv_scales: Tensor | None = None
) -> Tensor:
    """softmax(cap(scale * q k)) v of each sequence's last token over its keys in the cache, itself included.

    q [num_seqs, num_heads, head_dim], rows may lie apart -> the same, contiguous;
    kv_cache [num_blocks, block_size, 2 * num_kv_heads, head_dim], a token's keys before its values, of q's dtype or float8_e4m3fn;
    block_table [num_seqs, max_blocks] int32, what lies beyond a sequence's blocks is never used;
    context_lens [num_seqs] int32, 0 = padding, whose result is zero; kv_scales [2] float32: what keys and values are multiplied by.
    """
    if q.is_cuda:
        from loray.kernels import paged_attention_triton  # needs Triton, which a machine without a GPU may lack

        return paged_attention_triton.paged_attention(q, kv_cache, block_table, context_lens, scoring, kv_scales)
    out = torch.empty(q.shape, dtype=q.dtype)
    for seq, context_len in enumerate(context_lens.tolist()):
        keys, values = read_cache(kv_cache, block_table[seq], context_len, kv_scales)
        out[seq] = attend(q[seq : seq + 1], keys, values, scoring)[0]
    return out


def read_cache(kv_cache: Tensor, blocks: Tensor, context_len: int, kv_scales: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """One sequence's keys and values, [context_len, num_kv_heads, head_dim] each; float32 where they are scaled. blocks [max_blocks]"""
    block_size = kv_cache.shape[1]
    found = kv_cache[blocks[: -(-context_len // block_size)].long()].flatten(0, 1)[:context_len]
    keys, values = found.chunk(2, 1)
    if kv_scales is None:
        return keys, values
    return keys.float() * kv_scales[0], values.float() * kv_scales[1]
