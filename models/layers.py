"""Small layers that every rank holds whole: normalisation and activation."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class RMSNorm(nn.Module):
    def __init__(self, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(hidden_size), requires_grad=False)
        self.register_buffer("sqrt_eps", torch.tensor(eps**0.5, dtype=torch.float32), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """x / sqrt(mean(x²) + eps) * weight, the root in float32 and as few calls: a third of F.rms_norm's time for one token."""
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
        rms = norm.mul_(x.shape[-1] ** -0.5).hypot_(self.sqrt_eps)
        return (x / rms).to(x.dtype).mul_(self.weight)


def silu_mul(gate_up: Tensor) -> Tensor:
    """[num_tokens, 2 * intermediate], gate | up -> silu(gate) * up [num_tokens, intermediate]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)
