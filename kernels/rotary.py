"""Rotary position embedding, rotate-half layout, and with it what follows at once: keys and values go to their blocks.

Plain torch; on a GPU rotary_triton.py does both in one launch.
"""

import torch
from torch import Tensor

from loray.kernels.delta import plus_delta
from loray.kernels.kv_store import store_kv


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    """x = x * cos + (x2 | x1) * sin in place, where x1 | x2 are the halves of a head and sin carries the sign of its first half.

    x [num_tokens, num_heads, head_dim], cos and sin [num_tokens, 1, rotary_dim]; dimensions from rotary_dim on stay as they are.
    """
    x = x[..., : cos.shape[-1]]
    swapped = x.roll(cos.shape[-1] // 2, -1)
    x.mul_(cos).addcmul_(swapped, sin)


def rotate_and_store(
    qkv: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    kv_cache: Tensor,
    slots: Tensor,
    num_heads: int,
    num_kv_heads: int,
    *,
    kv_scales: Tensor | None = None,
    delta: Tensor | None = None,
    has_delta: Tensor | None = None,
) -> None:
    """qkv += delta for the tokens that have one; `rotate` q and k in place; kv_cache[slot] = k | v, and nothing for a slot of -1.

    qkv [num_tokens, num_heads + 2 * num_kv_heads, head_dim]; cos, sin [num_tokens, 1, rotary_dim], None = no rotary positions;
    kv_cache [num_blocks, block_size, 2 * num_kv_heads, head_dim]; slots [num_tokens] int64: block id * block size + offset;
    kv_scales [2] float32, of keys and of values, where the cache is float8: it gets x / scale, at most its largest number;
    delta of qkv's shape or flat, has_delta [num_tokens] int32, 0 = no.
    """
    if qkv.is_cuda:
        from loray.kernels.rotary_triton import rotate_and_store as on_gpu  # needs Triton, which a machine without a GPU may lack

        assert kv_cache.shape[2] == 2 * num_kv_heads and qkv.shape[1] == num_heads + 2 * num_kv_heads
        return on_gpu(qkv, None if cos is None or sin is None else (cos, sin), kv_cache, slots, kv_scales, (delta, has_delta))
    if delta is not None:
        qkv.copy_(plus_delta(qkv, delta, has_delta))
    if cos is not None and sin is not None:
        rotate(qkv[:, : num_heads + num_kv_heads], cos, sin)
    _store(kv_cache, qkv[:, num_heads:], slots, kv_scales)


def _store(kv_cache: Tensor, kv: Tensor, slots: Tensor, kv_scales: Tensor | None) -> None:
    if kv_scales is not None:
        largest = torch.finfo(kv_cache.dtype).max
        scales = kv_scales.repeat_interleave(kv.shape[1] // 2)[:, None]
        kv = (kv.float() / scales).clamp_(-largest, largest).to(kv_cache.dtype).view(torch.uint8)
        kv_cache = kv_cache.view(torch.uint8)  # torch copies no float8 by index
    if min(slots.tolist(), default=0) < 0:  # 0.5 µs for one token; slots.min() takes 4
        is_stored = slots >= 0
        kv, slots = kv[is_stored], slots[is_stored]
    store_kv(kv_cache, kv, slots)
