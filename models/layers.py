"""Small layers that every rank holds whole: normalisation, positions, activation."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.activations import ACT2FN


class RMSNorm(nn.Module):
    """`offset` is added to the checkpoint's weight: Gemma's is stored as its distance from one."""

    def __init__(self, size: int, eps: float, offset: float = 0.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size), requires_grad=False)
        self.register_buffer("sqrt_eps", torch.tensor(eps**0.5, dtype=torch.float32), persistent=False)
        self._offset = offset

    def forward(self, x: Tensor) -> Tensor:
        """x / sqrt(mean(x²) + eps) * weight, the root in float32 and as few calls: a third of F.rms_norm's time for one token."""
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
        rms = norm.mul_(x.shape[-1] ** -0.5).hypot_(self.sqrt_eps)
        return (x / rms).to(x.dtype).mul_(self.weight)

    def pack(self) -> None:
        self.weight.add_(self._offset)


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


def gate(act: nn.Module, gate_up: Tensor) -> Tensor:
    """[num_tokens, 2 * intermediate], gate | up -> act(gate) * up [num_tokens, intermediate]."""
    gated, up = gate_up.chunk(2, dim=-1)
    return act(gated).mul_(up)
