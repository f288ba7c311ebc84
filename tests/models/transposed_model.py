"""A language model as a checkpoint with code of its own brings it: past keys and values are tuples, keys transposed as BLOOM once did.

Copied into a model folder by its test; hence it imports nothing of ours.
"""

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast

Past = tuple[tuple[Tensor, Tensor], ...]  # keys [rows * heads, head_dim, length], values [rows * heads, length, head_dim]


class TransposedConfig(PretrainedConfig):
    model_type = "transposed"

    def __init__(self, vocab_size: int = 101, hidden_size: int = 24, num_heads: int = 3, num_layers: int = 2, **settings: object) -> None:
        self.vocab_size, self.hidden_size, self.num_heads, self.num_layers = vocab_size, hidden_size, num_heads, num_layers
        super().__init__(**settings)


class Attention(nn.Module):
    def __init__(self, config: TransposedConfig) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.query_key_value = nn.Linear(config.hidden_size, 3 * config.hidden_size)
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, x: Tensor, bias: Tensor, past: tuple[Tensor, Tensor] | None) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        # bias: [rows, 1, new, length]
        rows, new, hidden_size = x.shape
        heads = self.query_key_value(x).view(rows, new, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4).flatten(1, 2)
        query, keys, values = heads[0], heads[1].mT, heads[2]
        if past is not None:
            keys, values = torch.cat([past[0], keys], 2), torch.cat([past[1], values], 1)
        scores = (query @ keys).unflatten(0, (rows, -1)) / query.shape[-1] ** 0.5 + bias
        context = scores.softmax(-1).flatten(0, 1) @ values
        return self.dense(context.unflatten(0, (rows, -1)).transpose(1, 2).reshape(rows, new, hidden_size)), (keys, values)


class TransposedModel(PreTrainedModel):
    config_class = TransposedConfig

    def __init__(self, config: TransposedConfig) -> None:
        super().__init__(config)
        self.wte = nn.Embedding(config.vocab_size, config.hidden_size)
        self.h = nn.ModuleList([Attention(config) for _ in range(config.num_layers)])
        self.norm = nn.LayerNorm(config.hidden_size)
        self.post_init()

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, past_key_values: Past | None = None, use_cache: bool = True
    ) -> BaseModelOutputWithPast:
        x = self.wte(input_ids)
        new = input_ids.shape[1]
        length = new if past_key_values is None else new + past_key_values[0][1].shape[1]
        mask = torch.ones(len(x), length, dtype=torch.long) if attention_mask is None else attention_mask
        is_seen = mask[:, None, None, :].bool() & torch.ones(new, length, dtype=torch.bool).tril(length - new)
        distance = (torch.arange(length) - length + 1).float()  # a kind of ALiBi: nearer keys weigh more
        bias = distance.expand(is_seen.shape).masked_fill(~is_seen, torch.finfo(torch.float32).min)
        presents = []
        for i, layer in enumerate(self.h):
            y, present = layer(x, bias, None if past_key_values is None else past_key_values[i])
            x = x + y
            presents.append(present)
        return BaseModelOutputWithPast(last_hidden_state=self.norm(x), past_key_values=tuple(presents) if use_cache else None)


class TransposedForCausalLM(PreTrainedModel):
    config_class = TransposedConfig
    base_model_prefix = "transformer"

    def __init__(self, config: TransposedConfig) -> None:
        super().__init__(config)
        self.transformer = TransposedModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, past_key_values: Past | None = None, use_cache: bool = True
    ) -> CausalLMOutputWithPast:
        output = self.transformer(input_ids, attention_mask, past_key_values, use_cache)
        return CausalLMOutputWithPast(logits=self.lm_head(output.last_hidden_state), past_key_values=output.past_key_values)

    def get_input_embeddings(self) -> nn.Module:
        return self.transformer.wte

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head
