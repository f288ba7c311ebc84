"""Decode attention over the paged cache: one query a sequence. Plain torch here; on a GPU paged_attention_triton.py does it."""

import torch
from torch import Tensor

from loray.kernels import native
from loray.kernels.attention import Scoring, attend
from loray.kernels.paged_kv import PagedKV


def paged_attention(q: Tensor, kv: PagedKV, scoring: Scoring) -> Tensor:
    """softmax(cap(scale * q k)) v of each sequence's last token over its keys in the cache, itself included; zero where it has none.

    q [num_seqs, num_heads, head_dim], rows may lie apart -> the same, contiguous.
    """
    if q.is_cuda:
        from loray.kernels import paged_attention_triton  # needs Triton, which a machine without a GPU may lack

        return paged_attention_triton.paged_attention(q, kv, scoring)
    if kv.scales is None and native.serves(q.device, q.dtype):
        return native.paged_attention(q, kv, scoring)
    out = torch.empty(q.shape, dtype=q.dtype)
    for seq, (keys, values) in enumerate(kv.sequences()):
        out[seq] = attend(q[seq : seq + 1], keys, values, scoring)[0]
    return out
