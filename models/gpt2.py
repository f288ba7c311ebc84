"""GPT-2: learned positions, layer norms before each block, one fused c_attn, matrices stored [in, out]."""

from collections.abc import Sequence

from torch import Tensor, nn
from transformers import PretrainedConfig

from loray.kernels.attention import Scoring
from loray.models.attention import PagedAttention
from loray.models.batch import Batch
from loray.models.decoder import Decoder
from loray.models.kv_cache import LayerKV
from loray.models.layers import PositionEmbedding, activation
from loray.models.linear import column_linear, row_linear
from loray.models.parallel import Parallel
from loray.models.shards import cut, cut_heads
from loray.models.vocabulary import Embedding, Head


class GPT2Attention(nn.Module):
    def __init__(self, config: PretrainedConfig, parallel: Parallel, layer: int) -> None:
        super().__init__()
        hidden = config.hidden_size
        head_dim = hidden // config.num_attention_heads
        heads = cut_heads(config.num_attention_heads, config.num_attention_heads, parallel.rank, parallel.world_size)
        part = heads.query.scaled(head_dim)
        thirds = tuple(part.shifted(i * hidden) for i in range(3))  # of q, k and v, by heads each
        self.c_attn = column_linear(hidden, {"c_attn": (3 * hidden, thirds)}, True, parallel, is_conv1d=True)
        self.c_proj = row_linear("c_proj", (hidden, part), hidden, True, parallel, is_conv1d=True)
        scale = head_dim**-0.5 if config.scale_attn_weights else 1.0
        if config.scale_attn_by_inverse_layer_idx:
            scale /= layer + 1
        self.attention = PagedAttention(heads, head_dim, Scoring(scale), config.reorder_and_upcast_attn)

    def forward(self, x: Tensor, kv_cache: LayerKV, batch: Batch) -> Tensor:
        return self.c_proj(self.attention(self.c_attn.parted(x, batch), None, kv_cache, batch), batch)


class GPT2MLP(nn.Module):
    def __init__(self, config: PretrainedConfig, parallel: Parallel) -> None:
        super().__init__()
        hidden, size = config.hidden_size, config.n_inner or 4 * config.hidden_size
        part = cut(size, parallel.rank, parallel.world_size)
        self.c_fc = column_linear(hidden, {"c_fc": (size, part)}, True, parallel, is_conv1d=True)
        self.c_proj = row_linear("c_proj", (size, part), hidden, True, parallel, is_conv1d=True)
        self.act = activation(config.activation_function)

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        return self.c_proj(self.act(self.c_fc(x, batch)), batch)


class GPT2Block(nn.Module):
    def __init__(self, config: PretrainedConfig, parallel: Parallel, layer: int) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.hidden_size, config.layer_norm_epsilon)
        self.attn = GPT2Attention(config, parallel, layer)
        self.ln_2 = nn.LayerNorm(config.hidden_size, config.layer_norm_epsilon)
        self.mlp = GPT2MLP(config, parallel)

    def forward(self, x: Tensor, kv_cache: LayerKV, batch: Batch) -> Tensor:  # [num_tokens, hidden] -> same
        x = x + self.attn(self.ln_1(x), kv_cache, batch)
        return x + self.mlp(self.ln_2(x), batch)


class GPT2Model(nn.Module):
    def __init__(self, config: PretrainedConfig, parallel: Parallel) -> None:
        super().__init__()
        self.wte = Embedding(config.vocab_size, config.hidden_size, parallel)
        self.wpe = PositionEmbedding(config.max_position_embeddings, config.hidden_size)
        self.h = nn.ModuleList(GPT2Block(config, parallel, layer) for layer in range(config.num_hidden_layers))
        self.ln_f = nn.LayerNorm(config.hidden_size, config.layer_norm_epsilon)

    def forward(self, batch: Batch, kv_caches: Sequence[LayerKV]) -> Tensor:
        x = self.wte(batch) + self.wpe(batch.positions)
        for block, kv_cache in zip(self.h, kv_caches, strict=True):
            x = block(x, kv_cache, batch)
        return self.ln_f(x)


class GPT2LMHeadModel(Decoder):
    prefix = "transformer."
    ignored_tensors = (".attn.bias", ".attn.masked_bias")

    def __init__(self, config: PretrainedConfig, parallel: Parallel, max_total_tokens: int) -> None:
        if config.add_cross_attention:
            raise ValueError("GPT-2 with add_cross_attention is an encoder's partner, not a causal language model")
        heads = cut_heads(config.num_attention_heads, config.num_attention_heads, parallel.rank, parallel.world_size)
        super().__init__(config.num_hidden_layers, heads, config.hidden_size // config.num_attention_heads)
        self.transformer = GPT2Model(config, parallel)
        tied_to = self.transformer.wte if config.tie_word_embeddings else None
        self.lm_head = Head(config.vocab_size, config.hidden_size, parallel, tied_to)

    def hidden(self, batch: Batch, kv_caches: Sequence[LayerKV]) -> Tensor:
        return self.transformer(batch, kv_caches)
