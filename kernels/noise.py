"""Counter-based noise: a pure function of integers, so it needs no state and is the same on every device."""

import torch
from torch import Tensor


def gumbel_noise(keys: Tensor, num_tokens: int) -> Tensor:
    """-log(-log(u)) with u in (0, 1) a hash of (key, token).

    keys [num_rows, 2] int32 -> [num_rows, num_tokens] float32.
    """
    tokens = _mix(torch.arange(num_tokens, dtype=torch.int32, device=keys.device))
    bits = _mix(_mix(tokens ^ keys[:, :1]).add_(keys[:, 1:]))
    uniform = (bits >> 9).bitwise_and_(0x7FFFFF).float().add_(0.5).mul_(2.0**-23)  # exact in float32, never 0 or 1
    return uniform.log_().neg_().log_().neg_()


def _mix(x: Tensor) -> Tensor:
    """MurmurHash3's 32-bit finaliser, in place. int32 wraps; the masks turn arithmetic shifts into logical ones."""
    x.bitwise_xor_((x >> 16) & 0xFFFF).mul_(-2048144789)  # 0x85ebca6b
    x.bitwise_xor_((x >> 13) & 0x7FFFF).mul_(-1028477387)  # 0xc2b2ae35
    return x.bitwise_xor_((x >> 16) & 0xFFFF)
