"""Llama: grouped-query attention with rotary positions, SwiGLU, RMSNorm."""

from collections.abc import Sequence

from torch import Tensor, nn
from transformers import PretrainedConfig

from loray.kernels.kv_store import store_kv
from loray.kernels.rotary import rotate
from loray.models.attention import attend
from loray.models.batch import Batch
from loray.models.layers import RMSNorm, silu_mul
from loray.models.linear import Embedding, Head, column_linear, row_linear
from loray.models.parallel import Parallel
from loray.models.rotary import RotaryEmbedding
from loray.models.shards import cut, cut_heads

Rope = tuple[Tensor, Tensor]  # cos, sin of this step's positions


class LlamaAttention(nn.Module):
    def __init__(self, config: PretrainedConfig, parallel: Parallel) -> None:
        super().__init__()
        hidden, head_dim, bias = config.hidden_size, config.head_dim, config.attention_bias
        heads = cut_heads(config.num_attention_heads, config.num_key_value_heads, parallel.rank, parallel.world_size)
        self.num_heads, self.num_kv_heads, self.head_dim = heads.query.size, heads.kv.size, head_dim
        q_size, kv_size = config.num_attention_heads * head_dim, config.num_key_value_heads * head_dim
        query, kv = heads.query.scaled(head_dim), heads.kv.scaled(head_dim)
        outputs = {"q_proj": (q_size, query), "k_proj": (kv_size, kv), "v_proj": (kv_size, kv)}
        self.qkv_proj = column_linear(hidden, outputs, bias, parallel)
        self.o_proj = row_linear("o_proj", q_size, query, hidden, bias, parallel)

    def forward(self, x: Tensor, rope: Rope, kv_cache: Tensor, batch: Batch) -> Tensor:
        qkv = self.qkv_proj(x, batch).view(len(x), -1, self.head_dim)
        rotate(qkv[:, : self.num_heads + self.num_kv_heads], *rope)
        store_kv(kv_cache, qkv[:, self.num_heads :], batch.kv_slots)
        out = attend(qkv[:, : self.num_heads], kv_cache, batch)
        return self.o_proj(out.reshape(len(x), -1), batch)


class LlamaMLP(nn.Module):
    def __init__(self, config: PretrainedConfig, parallel: Parallel) -> None:
        super().__init__()
        hidden, size, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        part = cut(size, parallel.rank, parallel.world_size)
        self.gate_up_proj = column_linear(hidden, {"gate_proj": (size, part), "up_proj": (size, part)}, bias, parallel)
        self.down_proj = row_linear("down_proj", size, part, hidden, bias, parallel)

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        return self.down_proj(silu_mul(self.gate_up_proj(x, batch)), batch)


class LlamaDecoderLayer(nn.Module):
    def __init__(self, config: PretrainedConfig, parallel: Parallel) -> None:
        super().__init__()
        self.self_attn = LlamaAttention(config, parallel)
        self.mlp = LlamaMLP(config, parallel)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x: Tensor, rope: Rope, kv_cache: Tensor, batch: Batch) -> Tensor:  # [num_tokens, hidden] -> same
        x = x + self.self_attn(self.input_layernorm(x), rope, kv_cache, batch)
        return x + self.mlp(self.post_attention_layernorm(x), batch)


class LlamaModel(nn.Module):
    def __init__(self, config: PretrainedConfig, parallel: Parallel, max_total_tokens: int) -> None:
        super().__init__()
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, parallel)
        self.layers = nn.ModuleList(LlamaDecoderLayer(config, parallel) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.rotary_emb = RotaryEmbedding(config, config.head_dim, max_total_tokens)

    def forward(self, batch: Batch, kv_caches: Sequence[Tensor]) -> Tensor:
        x = self.embed_tokens(batch.input_ids)
        rope = self.rotary_emb(batch.positions)
        for layer, kv_cache in zip(self.layers, kv_caches, strict=True):
            x = layer(x, rope, kv_cache, batch)
        return x


class LlamaForCausalLM(nn.Module):
    def __init__(self, config: PretrainedConfig, parallel: Parallel, max_total_tokens: int) -> None:
        super().__init__()
        if config.hidden_act != "silu":
            raise ValueError(f"Llama with hidden_act {config.hidden_act!r} is not supported, only silu")
        self.model = LlamaModel(config, parallel, max_total_tokens)
        tied_to = self.model.embed_tokens if config.tie_word_embeddings else None
        self.lm_head = Head(config.vocab_size, config.hidden_size, parallel, tied_to)
        self.ignored_tensors = ("rotary_emb.inv_freq", *(["lm_head.weight"] if config.tie_word_embeddings else []))
        kv_heads = cut_heads(config.num_attention_heads, config.num_key_value_heads, parallel.rank, parallel.world_size).kv
        self.kv_shape: tuple[int, int, int] = (config.num_hidden_layers, kv_heads.size, config.head_dim)

    def forward(self, batch: Batch, kv_caches: Sequence[Tensor]) -> Tensor:  # -> [num_samples, vocab_size]
        """One cache for each layer, [num_blocks, block_size, 2 * num_kv_heads, head_dim]."""
        hidden = self.model(batch, kv_caches)
        if batch.sample_tokens is not None:
            hidden = hidden[batch.sample_tokens]
        return self.lm_head(self.model.norm(hidden))
