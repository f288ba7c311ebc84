"""Small layers that every rank holds whole: normalisation, positions, activation."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.activations import ACT2FN

from loray.kernels.delta import Parted
from loray.kernels.norm import add_rms_norm, rms_norm


class RMSNorm(nn.Module):
    """`offset` is added to the checkpoint's weight: Gemma's is stored as its distance from one, and used in float32."""

    def __init__(self, size: int, eps: float, offset: float = 0.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size), requires_grad=False)
        self._eps = eps
        self._offset = offset

    def forward(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """Over the last dimension; out may be x itself."""
        return rms_norm(x, self.weight, self._eps, out)

    def add(self, x: Tensor, added: Parted, scale: float = 1.0) -> Tensor:
        """x += scale * added in place; the new x, normalised."""
        return add_rms_norm(x, added, self.weight, self._eps, scale)

    def pack(self, _has_float8_weights: bool) -> None:
        if self._offset:
            self.weight.data = self.weight.float() + self._offset


class PositionEmbedding(nn.Module):
    """Learned positions; the first `offset` rows of the table stand for none."""

    def __init__(self, num_positions: int, size: int, offset: int = 0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_positions + offset, size), requires_grad=False)
        self._offset = offset

    def forward(self, positions: Tensor) -> Tensor:  # [num_tokens] -> [num_tokens, size]
        # A row that runs one step beyond its end asks for a position beyond the table; nobody reads its token.
        return F.embedding((positions + self._offset).clamp_(max=len(self.weight) - 1), self.weight)


def activation(name: str) -> nn.Module:
    """By transformers' name: silu, gelu, gelu_new, relu, …"""
    if name not in ACT2FN:
        raise ValueError(f"activation {name!r} is not known; known are {', '.join(sorted(ACT2FN))}")
    return ACT2FN[name]
