"""Rotary position embedding, rotate-half layout."""

from torch import Tensor


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    """x = x * cos + (x2 | x1) * sin in place, where x1 | x2 are the halves of a head and sin carries the sign of its first half.

    x [num_tokens, num_heads, head_dim], cos and sin [num_tokens, 1, rotary_dim]; dimensions from rotary_dim on stay as they are.
    """
    x = x[..., : cos.shape[-1]]
    swapped = x.roll(cos.shape[-1] // 2, -1)
    x.mul_(cos).addcmul_(swapped, sin)
