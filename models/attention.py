"""Attention over paged keys and values: PyTorch's scaled_dot_product_attention on gathered blocks, one call for each group."""

import torch
import torch.nn.functional as F
from torch import Tensor

from loray.kernels.kv_store import gather_kv
from loray.models.batch import AttentionGroup, Batch

BACKEND = "sdpa"


def attend(q: Tensor, kv: Tensor, batch: Batch) -> Tensor:
    """Each query against the keys of its own sequence up to itself, scaled by head_dim ** -0.5.

    q [num_tokens, num_heads, head_dim] -> the same; kv is one layer of the cache and already holds this step's keys and values.
    """
    if len(batch.groups) == 1 and isinstance(batch.groups[0].tokens, slice):
        return _attend_group(q, kv, batch.groups[0])
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    for group in batch.groups:
        out[group.tokens] = _attend_group(q, kv, group)
    return out


def _attend_group(q: Tensor, kv: Tensor, group: AttentionGroup) -> Tensor:
    keys, values = gather_kv(kv, group.blocks, group.num_seqs, group.context_len)
    q = q[group.tokens if group.padding is None else group.padding]
    num_heads, head_dim = q.shape[1:]
    if group.q_len == 1:  # the query heads that share a key head become its queries, so nothing is repeated
        q = q.view(group.num_seqs, keys.shape[1], -1, head_dim)
        return F.scaled_dot_product_attention(q, keys, values, attn_mask=group.mask).reshape(group.num_seqs, num_heads, head_dim)
    q = q.view(group.num_seqs, group.q_len, num_heads, head_dim).transpose(1, 2)
    out = F.scaled_dot_product_attention(q, keys, values, attn_mask=group.mask, is_causal=group.is_causal, enable_gqa=True)
    out = out.transpose(1, 2).reshape(-1, num_heads, head_dim)
    return out if group.unpadding is None else out[group.unpadding]
