"""Attention over paged keys and values: PyTorch's scaled_dot_product_attention on gathered blocks, one call for each group."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from loray.kernels.kv_store import gather_kv, store_kv
from loray.kernels.rotary import rotate
from loray.models.batch import AttentionGroup, Batch
from loray.models.shards import HeadShard

BACKEND = "sdpa"
Rope = tuple[Tensor, Tensor]  # cos, sin of this step's positions


@dataclass(frozen=True, slots=True)
class Scoring:
    """How a layer's queries weigh keys: softmax(cap(scale * q k)) over the window."""

    scale: float
    window: int = 0  # keys that a query sees, itself included; 0 = all before it
    cap: float = 0.0  # scores are squeezed into (-cap, cap) by tanh; 0 = not
    is_upcast: bool = False  # in float32, whatever the model's dtype


class PagedAttention:
    """The part between the projections, for this rank's heads: rotate, store keys and values, attend."""

    def __init__(self, heads: HeadShard, head_dim: int, scoring: Scoring) -> None:
        self.num_heads, self.num_kv_heads, self.head_dim = heads.query.size, heads.kv.size, head_dim
        self.scoring = scoring

    def __call__(self, qkv: Tensor, rope: Rope | None, kv_cache: Tensor, batch: Batch) -> Tensor:
        """qkv [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim] -> [num_tokens, num_heads * head_dim]; qkv is overwritten."""
        qkv = qkv.view(len(qkv), -1, self.head_dim)
        if rope is not None:
            rotate(qkv[:, : self.num_heads + self.num_kv_heads], *rope)
        store_kv(kv_cache, qkv[:, self.num_heads :], batch.kv_slots)
        return attend(qkv[:, : self.num_heads], kv_cache, batch, self.scoring).reshape(len(qkv), -1)


def attend(q: Tensor, kv: Tensor, batch: Batch, scoring: Scoring) -> Tensor:
    """Each query against the keys of its own sequence up to itself.

    q [num_tokens, num_heads, head_dim] -> the same; kv is one layer of the cache and already holds this step's keys and values.
    """
    if len(batch.groups) == 1 and isinstance(batch.groups[0].tokens, slice):
        return _attend_group(q, kv, batch.groups[0], scoring)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    for group in batch.groups:
        out[group.tokens] = _attend_group(q, kv, group, scoring)
    return out


def _attend_group(q: Tensor, kv: Tensor, group: AttentionGroup, scoring: Scoring) -> Tensor:
    keys, values = gather_kv(kv, group.blocks, group.num_seqs, group.context_len)
    q = q[group.tokens if group.padding is None else group.padding]
    num_heads, head_dim = q.shape[1:]
    if group.q_len == 1:  # the query heads that share a key head become its queries, so nothing is repeated
        q = q.view(group.num_seqs, keys.shape[1], -1, head_dim)
        return _weigh(q, keys, values, group, scoring).reshape(group.num_seqs, num_heads, head_dim)
    q = q.view(group.num_seqs, group.q_len, num_heads, head_dim).transpose(1, 2)
    out = _weigh(q, keys, values, group, scoring).transpose(1, 2).reshape(-1, num_heads, head_dim)
    return out if group.unpadding is None else out[group.unpadding]


def _weigh(q: Tensor, keys: Tensor, values: Tensor, group: AttentionGroup, scoring: Scoring) -> Tensor:
    """[num_seqs, heads, queries, head_dim] each; fewer key heads than query heads are shared among neighbours."""
    mask, is_causal = group.masks[scoring.window]
    if scoring.cap:
        return _weigh_capped(q, keys, values, mask, is_causal, scoring)
    if scoring.is_upcast and q.dtype != torch.float32:
        mask = None if mask is None else mask.float()
        out = F.scaled_dot_product_attention(
            q.float(), keys.float(), values.float(), mask, is_causal=is_causal, scale=scoring.scale, enable_gqa=True
        )
        return out.to(q.dtype)
    return F.scaled_dot_product_attention(q, keys, values, mask, is_causal=is_causal, scale=scoring.scale, enable_gqa=True)


def _weigh_capped(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, is_causal: bool, scoring: Scoring) -> Tensor:
    """Written out: scaled_dot_product_attention knows no cap."""
    num_seqs, num_heads, q_len, head_dim = q.shape
    q = q.reshape(num_seqs, keys.shape[1], -1, head_dim)  # heads that share a key head, one after another
    scores = (q @ keys.transpose(2, 3)).float().mul_(scoring.scale / scoring.cap).tanh_().mul_(scoring.cap)
    scores = scores.view(num_seqs, num_heads, q_len, -1)
    if is_causal:
        scores.masked_fill_(torch.ones(q_len, q_len, dtype=torch.bool, device=q.device).triu_(1), float("-inf"))
    elif mask is not None:
        scores += mask
    weights = scores.softmax(-1).to(q.dtype).view(num_seqs, keys.shape[1], -1, keys.shape[2])
    return (weights @ values).view(num_seqs, num_heads, q_len, head_dim)
