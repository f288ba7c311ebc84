"""Llama and the families that differ from it by flags: grouped-query attention with rotary positions, a gated MLP, RMSNorm."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from loray.kernels.attention import Scoring
from loray.kernels.delta import Parted
from loray.models.attention import PagedAttention, Rope
from loray.models.batch import Batch
from loray.models.decoder import Decoder
from loray.models.kv_cache import LayerKV
from loray.models.layers import RMSNorm, activation
from loray.models.linear import column_linear, row_linear
from loray.models.llama_variant import Variant, head_dim_of, variant_of
from loray.models.parallel import Parallel
from loray.models.rotary import RotaryEmbedding
from loray.models.shards import cut, cut_heads
from loray.models.vocabulary import Embedding, Head


class LlamaAttention(nn.Module):
    def __init__(self, config: PretrainedConfig, variant: Variant, parallel: Parallel, window: int) -> None:
        super().__init__()
        hidden, head_dim = config.hidden_size, head_dim_of(config)
        heads = cut_heads(config.num_attention_heads, config.num_key_value_heads, parallel.rank, parallel.world_size)
        q_size, kv_size = config.num_attention_heads * head_dim, config.num_key_value_heads * head_dim
        query, kv = heads.query.scaled(head_dim), heads.kv.scaled(head_dim)
        if variant.is_fused:
            parts = (query, kv.shifted(q_size), kv.shifted(q_size + kv_size))
            self.qkv_proj = column_linear(hidden, {"qkv_proj": (q_size + 2 * kv_size, parts)}, variant.qkv_bias, parallel)
        else:
            outputs = {"q_proj": (q_size, query), "k_proj": (kv_size, kv), "v_proj": (kv_size, kv)}
            self.qkv_proj = column_linear(hidden, outputs, variant.qkv_bias, parallel)
        self.o_proj = row_linear("o_proj", (q_size, query), hidden, variant.o_bias, parallel)
        self.q_norm = RMSNorm(head_dim, config.rms_norm_eps, variant.norm_offset) if variant.has_qk_norm else None
        self.k_norm = RMSNorm(head_dim, config.rms_norm_eps, variant.norm_offset) if variant.has_qk_norm else None
        self.attention = PagedAttention(heads, head_dim, Scoring(variant.score_scale, window, variant.score_cap))

    def forward(self, x: Tensor, rope: Rope, kv_cache: LayerKV, batch: Batch) -> Parted:
        qkv = self.qkv_proj.parted(x, batch)
        if self.q_norm is not None and self.k_norm is not None:
            qkv = Parted(qkv.joined())
            heads = qkv.y.view(len(x), -1, self.attention.head_dim)
            q, k, _ = heads.split((self.attention.num_heads, self.attention.num_kv_heads, self.attention.num_kv_heads), 1)
            self.q_norm(q, out=q)
            self.k_norm(k, out=k)
        return self.o_proj.parted(self.attention(qkv, rope, kv_cache, batch), batch)


class LlamaMLP(nn.Module):
    def __init__(self, config: PretrainedConfig, variant: Variant, parallel: Parallel) -> None:
        super().__init__()
        hidden, size, bias = config.hidden_size, config.intermediate_size, variant.mlp_bias
        part = cut(size, parallel.rank, parallel.world_size)
        if variant.is_fused:
            self.gate_up_proj = column_linear(hidden, {"gate_up_proj": (2 * size, (part, part.shifted(size)))}, bias, parallel)
        else:
            self.gate_up_proj = column_linear(hidden, {"gate_proj": (size, part), "up_proj": (size, part)}, bias, parallel)
        self.down_proj = row_linear("down_proj", (size, part), hidden, bias, parallel)
        self.act = activation(variant.activation)

    def forward(self, x: Tensor, batch: Batch) -> Parted:
        return self.down_proj.parted(self.gate_up_proj.gated(self.act, x, batch), batch)


class LlamaDecoderLayer(nn.Module):
    """Reads the hidden states and what the layer before has yet to add to them; leaves its own last addition to the next."""

    def __init__(self, config: PretrainedConfig, variant: Variant, parallel: Parallel, window: int) -> None:
        super().__init__()
        self.self_attn = LlamaAttention(config, variant, parallel, window)
        self.mlp = LlamaMLP(config, variant, parallel)
        self.input_layernorm = rms_norm(config, variant)
        self.post_attention_layernorm = rms_norm(config, variant)
        self._scale = variant.residual_scale

    def forward(self, x: Tensor, added: Parted | None, rope: Rope, kv_cache: LayerKV, batch: Batch) -> Parted:
        """x [num_tokens, hidden], in place: all but what comes back is added to it."""
        added = self.self_attn(add_norm(self.input_layernorm, x, added, self._scale), rope, kv_cache, batch)
        return self.mlp(add_norm(self.post_attention_layernorm, x, added, self._scale), batch)


class PostNormDecoderLayer(LlamaDecoderLayer):
    """Gemma 2 and 3: what attention and MLP give is normalised too, before it is added."""

    def __init__(self, config: PretrainedConfig, variant: Variant, parallel: Parallel, window: int) -> None:
        super().__init__(config, variant, parallel, window)
        self.pre_feedforward_layernorm = rms_norm(config, variant)
        self.post_feedforward_layernorm = rms_norm(config, variant)

    def forward(self, x: Tensor, added: Parted | None, rope: Rope, kv_cache: LayerKV, batch: Batch) -> Parted:
        attended = self.self_attn(add_norm(self.input_layernorm, x, added), rope, kv_cache, batch)
        normed = self.pre_feedforward_layernorm.add(x, Parted(self.post_attention_layernorm(attended.joined())))
        return Parted(self.post_feedforward_layernorm(self.mlp(normed, batch).joined()))


class LlamaModel(nn.Module):
    def __init__(self, config: PretrainedConfig, variant: Variant, parallel: Parallel, max_total_tokens: int) -> None:
        super().__init__()
        layer = PostNormDecoderLayer if variant.has_post_norms else LlamaDecoderLayer
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, parallel)
        self.layers = nn.ModuleList(layer(config, variant, parallel, window) for window in variant.windows)
        self.norm = rms_norm(config, variant)
        rotary_dim = int(head_dim_of(config) * variant.rotary_share)
        ropes = {f"rope_{kind}": RotaryEmbedding(config, rotary_dim, max_total_tokens, kind) for kind in sorted(set(variant.rope_kinds))}
        self.rotary_embs = nn.ModuleDict(ropes)
        self._variant = variant
        # Rounded to the model's dtype, as Gemma does it.
        self._embedding_scale = torch.tensor(variant.embedding_scale, dtype=torch.get_default_dtype(), device="cpu").item()

    def forward(self, batch: Batch, kv_caches: Sequence[LayerKV]) -> Tensor:
        variant = self._variant
        x = self.embed_tokens(batch)
        if variant.embedding_scale != 1:
            x *= self._embedding_scale
        ropes = {name: rotary(batch.positions) for name, rotary in self.rotary_embs.items()}
        kept: dict[int, Tensor] = {}
        added: Parted | None = None
        for index, (layer, kind, kv_cache) in enumerate(zip(self.layers, variant.rope_kinds, kv_caches, strict=True)):
            if variant.skips is not None:
                x, added = self._skip(x, added, index, kept), None
            added = layer(x, added, ropes[f"rope_{kind}"], kv_cache, batch)
        return add_norm(self.norm, x, added, variant.residual_scale)

    def _skip(self, x: Tensor, added: Parted | None, index: int, kept: dict[int, Tensor]) -> Tensor:
        skips = self._variant.skips
        assert skips is not None
        if added is not None:
            x = x.add(added.joined(), alpha=self._variant.residual_scale)
        for place, layers in enumerate(skips.keeps):
            if index in layers:
                kept[place] = x.clone()
        for place, layers in enumerate(skips.mixes):
            if index in layers:
                x = kept[place] * skips.weight + x * (1 - skips.weight)
        return x


class LlamaForCausalLM(Decoder):
    prefix = "model."
    ignored_tensors = ("rotary_emb.inv_freq",)

    def __init__(self, config: PretrainedConfig, parallel: Parallel, max_total_tokens: int) -> None:
        variant = variant_of(config)
        heads = cut_heads(config.num_attention_heads, config.num_key_value_heads, parallel.rank, parallel.world_size)
        super().__init__(config.num_hidden_layers, heads, head_dim_of(config))
        self.windows, self.score_cap = frozenset(variant.windows), variant.score_cap
        self.model = LlamaModel(config, variant, parallel, max_total_tokens)
        tied_to = self.model.embed_tokens if config.tie_word_embeddings else None
        self.lm_head = Head(config.vocab_size, config.hidden_size, parallel, tied_to)
        self._logit_scale, self._logit_cap = variant.logit_scale, variant.logit_cap

    def hidden(self, batch: Batch, kv_caches: Sequence[LayerKV]) -> Tensor:
        return self.model(batch, kv_caches)

    def logits(self, hidden: Tensor, batch: Batch) -> Tensor:
        logits = self.lm_head(hidden, batch)
        if self._logit_scale != 1:
            logits *= self._logit_scale
        if self._logit_cap:
            logits = logits.div_(self._logit_cap).tanh_().mul_(self._logit_cap)
        return logits


def rms_norm(config: PretrainedConfig, variant: Variant) -> RMSNorm:
    return RMSNorm(config.hidden_size, config.rms_norm_eps, variant.norm_offset)


def add_norm(norm: RMSNorm, x: Tensor, added: Parted | None, scale: float = 1.0) -> Tensor:
    """x += scale * added, in place; the new x, normalised. [num_tokens, hidden]"""
    return norm(x) if added is None else norm.add(x, added, scale)
