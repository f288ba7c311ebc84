"""Rotary frequencies of every kind that transformers knows. Computed once for a server, never read from a checkpoint.

dynamic and longrope choose their frequencies by sequence length, and transformers chooses anew in every forward pass: cached
keys then disagree with later queries, and a sequence's numbers depend on how it was cut into passes. Here the length is
max_total_tokens, the longest sequence this server admits. So a request's numbers depend on nothing but itself; they equal
transformers' where the server's limit and the sequence lie on the same side of the model's original length (longrope), or
where the limit is at most max_position_embeddings (dynamic).
"""

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from loray.kernels import native


class RotaryEmbedding(nn.Module):
    """`layer_kind` picks one of several sets of parameters in the config; "" where there is only one.

    Kinds other than the default read the size of the rotated part from the config."""

    inv_freq: Tensor  # [rotary_dim / 2] float32

    def __init__(self, config: PretrainedConfig, rotary_dim: int, max_total_tokens: int, layer_kind: str = "") -> None:
        super().__init__()
        inv_freq, self.scaling = _frequencies(config, rotary_dim, max_total_tokens, layer_kind)
        self.register_buffer("inv_freq", inv_freq.to(torch.get_default_device(), torch.float32), persistent=False)
        self.dtype = torch.get_default_dtype()
        self._tables: tuple[Tensor, Tensor] | None = None  # where native.c takes from them: of all positions, [positions, rotary_dim] each
        if native.serves(torch.get_default_device(), self.dtype):
            cos, sin = self._angles(torch.arange(max_total_tokens))
            self._tables = cos.squeeze(1), sin.squeeze(1)

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """[num_tokens] -> cos and sin, [num_tokens, 1, rotary_dim] each, as `rotate` wants them."""
        return self._angles(positions) if self._tables is None else native.take_angles(positions, *self._tables)

    def _angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        angles = positions[:, None, None].float() * self.inv_freq
        cos, sin = angles.cos() * self.scaling, angles.sin() * self.scaling
        return torch.cat((cos, cos), -1).to(self.dtype), torch.cat((-sin, sin), -1).to(self.dtype)


def _frequencies(config: PretrainedConfig, rotary_dim: int, max_total_tokens: int, layer_kind: str) -> tuple[Tensor, float]:
    parameters = config.rope_parameters[layer_kind] if layer_kind else config.rope_parameters
    kind = parameters["rope_type"]
    with torch.device("cpu"):
        if kind == "default":
            exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim
            return 1.0 / (parameters["rope_theta"] ** exponents), 1.0
        if kind not in ROPE_INIT_FUNCTIONS:
            raise ValueError(f"rotary embedding {kind!r} is not known; known are default, {', '.join(sorted(ROPE_INIT_FUNCTIONS))}")
        cpu = torch.device("cpu")
        return ROPE_INIT_FUNCTIONS[kind](config, cpu, seq_len=max_total_tokens, layer_type=layer_kind or None)
