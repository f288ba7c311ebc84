"""Root-mean-square normalisation, alone or after adding to the residual. Plain torch; on a GPU norm_triton.py does it,
on a CPU native.c where it can."""

from functools import lru_cache

import torch
from torch import Tensor

from loray.kernels import native
from loray.kernels.delta import Parted


def rms_norm(x: Tensor, weight: Tensor, eps: float, out: Tensor | None = None) -> Tensor:
    """x / sqrt(mean(x²) + eps) rounded to weight's dtype, times weight; the root in float32. The result has x's dtype.

    x [num_tokens, size] or [num_tokens, num_heads, size], weight [size]; out may be x itself.
    """
    if x.is_cuda:
        from loray.kernels.norm_triton import rms_norm as on_gpu  # needs Triton, which a machine without a GPU may lack

        return on_gpu(x, weight, eps, out)
    if x.dim() == 2 and native.serves(x.device, x.dtype):
        return native.rms_norm(x, weight, eps, out)
    # As few calls as can be: a third of F.rms_norm's time for one token.
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
    rms = norm.mul_(x.shape[-1] ** -0.5).hypot_(_sqrt(eps))
    normed = (x / rms).to(weight.dtype).mul_(weight).to(x.dtype)
    return normed if out is None else out.copy_(normed)


def add_rms_norm(x: Tensor, added: Parted, weight: Tensor, eps: float, scale: float = 1.0) -> Tensor:
    """x += scale * added in place, rounded to x's dtype; then rms_norm(x). x, added and the result [num_tokens, size]."""
    if x.is_cuda:
        from loray.kernels.norm_triton import add_rms_norm as on_gpu

        return on_gpu(x, added, weight, eps, scale)
    if native.serves(x.device, x.dtype):
        return native.rms_norm(x, weight, eps, added=added.joined(), scale=scale)
    if x.dtype == torch.float32:
        x.add_(added.joined(), alpha=scale)
    else:  # some CPUs would round the product before the sum
        x.copy_(torch.add(x.float(), added.joined().float(), alpha=scale))
    return rms_norm(x, weight, eps)


@lru_cache
def _sqrt(eps: float) -> Tensor:
    """hypot takes tensors alone, and making one costs as much as the call."""
    return torch.tensor(eps**0.5, dtype=torch.float32, device="cpu")
