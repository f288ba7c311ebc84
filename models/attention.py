"""Attention over paged keys and values: on a GPU where the blocks lie, on a CPU by PyTorch's scaled_dot_product_attention on gathered
blocks, one call for each group."""

import torch
import torch.nn.functional as F
from torch import Tensor

from loray.kernels.attention import PromptWork, Scoring
from loray.kernels.delta import Parted
from loray.kernels.kv_store import gather_kv
from loray.kernels.paged_attention import paged_attention
from loray.kernels.paged_kv import PagedKV
from loray.kernels.paged_prefill import paged_prefill
from loray.kernels.prefix_gather import gather_prefix
from loray.kernels.rotary import rotate_and_store
from loray.kernels.varlen_attention import FLASH_ATTN, TORCH_VARLEN, backend, varlen_attention
from loray.models.batch import AttentionGroup, Batch, PagedWork
from loray.models.kv_cache import LayerKV
from loray.models.shards import HeadShard

Rope = tuple[Tensor, Tensor]  # cos, sin of this step's positions


class PagedAttention:
    """The part between the projections, for this rank's heads: rotate, store keys and values, attend."""

    def __init__(self, heads: HeadShard, head_dim: int, scoring: Scoring, is_upcast: bool = False) -> None:
        self.num_heads, self.num_kv_heads, self.head_dim = heads.query.size, heads.kv.size, head_dim
        self.scoring = scoring
        self.is_upcast = is_upcast  # in float32, whatever the model's dtype

    def __call__(self, qkv: Parted, rope: Rope | None, kv_cache: LayerKV, batch: Batch) -> Tensor:
        """qkv [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim] -> [num_tokens, num_heads * head_dim]; qkv is overwritten."""
        rotate_and_store(qkv, rope, kv_cache.blocks, batch.kv_slots, self.num_heads, kv_cache.scales)
        heads = qkv.y.view(len(qkv.y), -1, self.head_dim)
        return self._attend(heads[:, : self.num_heads], kv_cache, batch).reshape(len(heads), -1)

    def _attend(self, q: Tensor, kv: LayerKV, batch: Batch) -> Tensor:
        """Each query against the keys of its own sequence up to itself.

        q [num_tokens, num_heads, head_dim] -> the same; kv is one layer of the cache and already holds this step's keys and values.
        """
        work = batch.attention
        if isinstance(work, tuple):
            decodes, groups = None, work
        elif isinstance(work.prompts, tuple):
            decodes, groups = _attend_decodes(q, kv, work, self.scoring), work.prompts
        else:
            return _attend_paged(q, kv, work, work.prompts, self.scoring)
        if decodes is not None and not groups:
            return decodes
        if decodes is None and len(groups) == 1 and isinstance(groups[0].tokens, slice):
            return _attend_group(q, kv.blocks, groups[0], self.scoring, self.is_upcast)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        if decodes is not None:
            out[: len(decodes)] = decodes
        for group in groups:
            out[group.tokens] = _attend_group(q, kv.blocks, group, self.scoring, self.is_upcast)
        return out


def _attend_decodes(q: Tensor, layer: LayerKV, work: PagedWork, scoring: Scoring) -> Tensor:
    count = work.num_decodes
    return paged_attention(q[:count], PagedKV(layer.blocks, work.block_table[:count], work.context_lens[:count], layer.scales), scoring)


def _attend_paged(q: Tensor, layer: LayerKV, work: PagedWork, prompts: PromptWork | None, scoring: Scoring) -> Tensor:
    """Kernels add up in float32 in any case."""
    count = work.num_decodes
    parts = [_attend_decodes(q, layer, work, scoring)] if count else []
    if prompts is not None:
        kv = PagedKV(layer.blocks, work.block_table[count:], work.context_lens[count:], layer.scales)
        parts.append(_attend_prompts(q[count:], kv, prompts, scoring, work.may_copy))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _attend_prompts(q: Tensor, kv: PagedKV, prompts: PromptWork, scoring: Scoring, may_copy: bool) -> Tensor:
    if not may_copy or backend(q.device, q.dtype, kv.cache.dtype, q.shape[2], scoring) not in (FLASH_ATTN, TORCH_VARLEN):
        return paged_prefill(q, kv, prompts, scoring)
    keys, values = gather_prefix(kv.cache, kv.block_table, prompts.first_keys, prompts.num_keys)
    return varlen_attention(q, keys, values, prompts, scoring)


def _attend_group(q: Tensor, kv: Tensor, group: AttentionGroup, scoring: Scoring, is_upcast: bool) -> Tensor:
    keys, values = gather_kv(kv, group.blocks, group.num_seqs, group.context_len)
    q = q[group.tokens if group.padding is None else group.padding]
    num_heads, head_dim = q.shape[1:]
    if group.q_len == 1:  # the query heads that share a key head become its queries, so nothing is repeated
        q = q.view(group.num_seqs, keys.shape[1], -1, head_dim)
        return _weigh(q, keys, values, group, scoring, is_upcast).reshape(group.num_seqs, num_heads, head_dim)
    q = q.view(group.num_seqs, group.q_len, num_heads, head_dim).transpose(1, 2)
    out = _weigh(q, keys, values, group, scoring, is_upcast).transpose(1, 2).reshape(-1, num_heads, head_dim)
    return out if group.unpadding is None else out[group.unpadding]


def _weigh(q: Tensor, keys: Tensor, values: Tensor, group: AttentionGroup, scoring: Scoring, is_upcast: bool) -> Tensor:
    """[num_seqs, heads, queries, head_dim] each; fewer key heads than query heads are shared among neighbours."""
    mask, is_causal = group.masks[scoring.window]
    if scoring.cap:
        return _weigh_capped(q, keys, values, mask, is_causal, scoring)
    if is_upcast and q.dtype != torch.float32:
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
