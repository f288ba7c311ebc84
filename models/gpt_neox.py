"""GPT-NeoX (Pythia): rotary positions on a part of each head, attention and MLP side by side."""

from collections.abc import Sequence

from torch import Tensor, nn
from transformers import PretrainedConfig

from loray.kernels.attention import Scoring
from loray.models.attention import PagedAttention, Rope
from loray.models.batch import Batch
from loray.models.decoder import Decoder
from loray.models.kv_cache import LayerKV
from loray.models.layers import activation
from loray.models.linear import column_linear, row_linear
from loray.models.parallel import Parallel
from loray.models.rotary import RotaryEmbedding
from loray.models.shards import Shard, cut, cut_heads
from loray.models.vocabulary import Embedding, Head


class GPTNeoXAttention(nn.Module):
    def __init__(self, config: PretrainedConfig, parallel: Parallel) -> None:
        super().__init__()
        hidden, bias = config.hidden_size, config.attention_bias
        head_dim = hidden // config.num_attention_heads
        heads = cut_heads(config.num_attention_heads, config.num_attention_heads, parallel.rank, parallel.world_size)
        own = range(heads.query.start, heads.query.slice.stop)
        parts = tuple(Shard((3 * head + i) * head_dim, head_dim) for i in range(3) for head in own)  # the checkpoint has q, k, v by head
        self.query_key_value = column_linear(hidden, {"query_key_value": (3 * hidden, parts)}, bias, parallel)
        self.dense = row_linear("dense", (hidden, heads.query.scaled(head_dim)), hidden, bias, parallel)
        self.attention = PagedAttention(heads, head_dim, Scoring(head_dim**-0.5))

    def partial(self, x: Tensor, rope: Rope, kv_cache: LayerKV, batch: Batch) -> Tensor:
        return self.dense.partial(self.attention(self.query_key_value.parted(x, batch), rope, kv_cache, batch), batch)


class GPTNeoXMLP(nn.Module):
    def __init__(self, config: PretrainedConfig, parallel: Parallel) -> None:
        super().__init__()
        hidden, size = config.hidden_size, config.intermediate_size
        part = cut(size, parallel.rank, parallel.world_size)
        self.dense_h_to_4h = column_linear(hidden, {"dense_h_to_4h": (size, part)}, True, parallel)
        self.dense_4h_to_h = row_linear("dense_4h_to_h", (size, part), hidden, True, parallel)
        self.act = activation(config.hidden_act)

    def partial(self, x: Tensor, batch: Batch) -> Tensor:
        return self.dense_4h_to_h.partial(self.act(self.dense_h_to_4h(x, batch)), batch)


class GPTNeoXLayer(nn.Module):
    def __init__(self, config: PretrainedConfig, parallel: Parallel) -> None:
        super().__init__()
        self.input_layernorm = nn.LayerNorm(config.hidden_size, config.layer_norm_eps)
        self.post_attention_layernorm = nn.LayerNorm(config.hidden_size, config.layer_norm_eps)
        self.attention = GPTNeoXAttention(config, parallel)
        self.mlp = GPTNeoXMLP(config, parallel)
        self._is_parallel_residual = config.use_parallel_residual
        self._all_reduce = parallel.all_reduce

    def forward(self, x: Tensor, rope: Rope, kv_cache: LayerKV, batch: Batch) -> Tensor:  # [num_tokens, hidden] -> same
        attended = self.attention.partial(self.input_layernorm(x), rope, kv_cache, batch)
        if self._is_parallel_residual:  # one sum over the ranks for both
            return x + self._all_reduce(attended + self.mlp.partial(self.post_attention_layernorm(x), batch))
        x = x + self._all_reduce(attended)
        return x + self._all_reduce(self.mlp.partial(self.post_attention_layernorm(x), batch))


class GPTNeoXModel(nn.Module):
    def __init__(self, config: PretrainedConfig, parallel: Parallel, max_total_tokens: int) -> None:
        super().__init__()
        self.embed_in = Embedding(config.vocab_size, config.hidden_size, parallel)
        self.layers = nn.ModuleList(GPTNeoXLayer(config, parallel) for _ in range(config.num_hidden_layers))
        self.final_layer_norm = nn.LayerNorm(config.hidden_size, config.layer_norm_eps)
        rotary_dim = int(config.hidden_size // config.num_attention_heads * config.rope_parameters.get("partial_rotary_factor", 1.0))
        self.rotary_emb = RotaryEmbedding(config, rotary_dim, max_total_tokens)

    def forward(self, batch: Batch, kv_caches: Sequence[LayerKV]) -> Tensor:
        x = self.embed_in(batch)
        rope = self.rotary_emb(batch.positions)
        for layer, kv_cache in zip(self.layers, kv_caches, strict=True):
            x = layer(x, rope, kv_cache, batch)
        return self.final_layer_norm(x)


class GPTNeoXForCausalLM(Decoder):
    prefix = "gpt_neox."
    renamed = {"lm_head.weight": "embed_out.weight"}
    ignored_tensors = (".attention.bias", ".attention.masked_bias", ".rotary_emb.inv_freq")

    def __init__(self, config: PretrainedConfig, parallel: Parallel, max_total_tokens: int) -> None:
        heads = cut_heads(config.num_attention_heads, config.num_attention_heads, parallel.rank, parallel.world_size)
        super().__init__(config.num_hidden_layers, heads, config.hidden_size // config.num_attention_heads)
        self.gpt_neox = GPTNeoXModel(config, parallel, max_total_tokens)
        tied_to = self.gpt_neox.embed_in if config.tie_word_embeddings else None
        self.lm_head = Head(config.vocab_size, config.hidden_size, parallel, tied_to)

    def hidden(self, batch: Batch, kv_caches: Sequence[LayerKV]) -> Tensor:
        return self.gpt_neox(batch, kv_caches)
