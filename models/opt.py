"""OPT and Galactica: learned positions, layer norms before or after each block, ReLU."""

from collections.abc import Sequence

from torch import Tensor, nn
from transformers import PretrainedConfig

from loray.kernels.attention import Scoring
from loray.models.attention import PagedAttention
from loray.models.batch import Batch
from loray.models.decoder import Decoder
from loray.models.kv_cache import LayerKV
from loray.models.layers import PositionEmbedding, activation
from loray.models.linear import column_linear, row_linear, whole_linear
from loray.models.parallel import Parallel
from loray.models.shards import cut, cut_heads
from loray.models.vocabulary import Embedding, Head


class OPTAttention(nn.Module):
    def __init__(self, config: PretrainedConfig, parallel: Parallel) -> None:
        super().__init__()
        hidden, bias = config.hidden_size, config.enable_bias
        head_dim = hidden // config.num_attention_heads
        heads = cut_heads(config.num_attention_heads, config.num_attention_heads, parallel.rank, parallel.world_size)
        part = heads.query.scaled(head_dim)
        self.qkv_proj = column_linear(hidden, dict.fromkeys(("q_proj", "k_proj", "v_proj"), (hidden, part)), bias, parallel)
        self.out_proj = row_linear("out_proj", (hidden, part), hidden, bias, parallel)
        self.attention = PagedAttention(heads, head_dim, Scoring(head_dim**-0.5))

    def forward(self, x: Tensor, kv_cache: LayerKV, batch: Batch) -> Tensor:
        return self.out_proj(self.attention(self.qkv_proj.parted(x, batch), None, kv_cache, batch), batch)


class OPTDecoderLayer(nn.Module):
    def __init__(self, config: PretrainedConfig, parallel: Parallel) -> None:
        super().__init__()
        hidden, size, bias = config.hidden_size, config.ffn_dim, config.enable_bias
        part = cut(size, parallel.rank, parallel.world_size)
        self.self_attn = OPTAttention(config, parallel)
        self.fc1 = column_linear(hidden, {"fc1": (size, part)}, bias, parallel)
        self.fc2 = row_linear("fc2", (size, part), hidden, bias, parallel)
        self.activation_fn = activation(config.activation_function)
        self.self_attn_layer_norm = layer_norm(config)
        self.final_layer_norm = layer_norm(config)
        self._is_pre_norm = config.do_layer_norm_before

    def forward(self, x: Tensor, kv_cache: LayerKV, batch: Batch) -> Tensor:  # [num_tokens, hidden] -> same
        if self._is_pre_norm:
            x = x + self.self_attn(self.self_attn_layer_norm(x), kv_cache, batch)
            return x + self._mlp(self.final_layer_norm(x), batch)
        x = self.self_attn_layer_norm(x + self.self_attn(x, kv_cache, batch))
        return self.final_layer_norm(x + self._mlp(x, batch))

    def _mlp(self, x: Tensor, batch: Batch) -> Tensor:
        return self.fc2(self.activation_fn(self.fc1(x, batch)), batch)


class OPTDecoder(nn.Module):
    def __init__(self, config: PretrainedConfig, parallel: Parallel) -> None:
        super().__init__()
        hidden, embed = config.hidden_size, config.word_embed_proj_dim
        self.embed_tokens = Embedding(config.vocab_size, embed, parallel)
        self.embed_positions = PositionEmbedding(config.max_position_embeddings, hidden, offset=2)
        self.project_in = whole_linear("project_in", embed, hidden, False, parallel) if embed != hidden else None
        self.project_out = whole_linear("project_out", hidden, embed, False, parallel) if embed != hidden else None
        has_final_norm = config.do_layer_norm_before and not config._remove_final_layer_norm
        self.final_layer_norm = layer_norm(config) if has_final_norm else None
        self.layers = nn.ModuleList(OPTDecoderLayer(config, parallel) for _ in range(config.num_hidden_layers))

    def forward(self, batch: Batch, kv_caches: Sequence[LayerKV]) -> Tensor:
        x = self.embed_tokens(batch)
        if self.project_in is not None:
            x = self.project_in(x, batch)
        x = x + self.embed_positions(batch.positions)
        for layer, kv_cache in zip(self.layers, kv_caches, strict=True):
            x = layer(x, kv_cache, batch)
        if self.final_layer_norm is not None:
            x = self.final_layer_norm(x)
        return x if self.project_out is None else self.project_out(x, batch)


class OPTModel(nn.Module):
    def __init__(self, config: PretrainedConfig, parallel: Parallel) -> None:
        super().__init__()
        self.decoder = OPTDecoder(config, parallel)


class OPTForCausalLM(Decoder):
    prefix = "model."

    def __init__(self, config: PretrainedConfig, parallel: Parallel, max_total_tokens: int) -> None:
        heads = cut_heads(config.num_attention_heads, config.num_attention_heads, parallel.rank, parallel.world_size)
        super().__init__(config.num_hidden_layers, heads, config.hidden_size // config.num_attention_heads)
        self.model = OPTModel(config, parallel)
        tied_to = self.model.decoder.embed_tokens if config.tie_word_embeddings else None
        self.lm_head = Head(config.vocab_size, config.word_embed_proj_dim, parallel, tied_to)

    def hidden(self, batch: Batch, kv_caches: Sequence[LayerKV]) -> Tensor:
        return self.model.decoder(batch, kv_caches)


def layer_norm(config: PretrainedConfig) -> nn.LayerNorm:
    return nn.LayerNorm(config.hidden_size, elementwise_affine=config.layer_norm_elementwise_affine)
