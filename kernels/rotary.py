"""Rotary position embedding, rotate-half layout, and with it what follows at once: keys and values go to their blocks.

Plain torch; on a GPU rotary_triton.py does both in one launch.
"""

import torch
from torch import Tensor

from loray.kernels import native
from loray.kernels.delta import Parted
from loray.kernels.kv_store import store_kv


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    """x = x * cos + (x2 | x1) * sin in place, where x1 | x2 are the halves of a head and sin carries the sign of its first half.

    x [num_tokens, num_heads, head_dim], cos and sin [num_tokens, 1, rotary_dim]; dimensions from rotary_dim on stay as they are.
    """
    x = x[..., : cos.shape[-1]]
    swapped = x.roll(cos.shape[-1] // 2, -1)
    x.mul_(cos).addcmul_(swapped, sin)


def rotate_and_store(
    qkv: Parted,
    rope: tuple[Tensor, Tensor] | None,
    kv_cache: Tensor,
    slots: Tensor,
    num_heads: int,
    kv_scales: Tensor | None = None,
) -> None:
    """qkv.y += its delta; `rotate` q and k in it; kv_cache[slot] = k | v, and nothing for a slot of -1.

    qkv [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim]; rope: cos and sin [num_tokens, 1, rotary_dim], None = no rotary positions;
    kv_cache [num_blocks, block_size, 2 * num_kv_heads, head_dim]; slots [num_tokens] int64: block id * block size + offset;
    kv_scales [2] float32, of keys and of values, where the cache is float8: it gets x / scale, at most its largest number.
    """
    if qkv.y.is_cuda:
        from loray.kernels.rotary_triton import rotate_and_store as on_gpu  # needs Triton, which a machine without a GPU may lack

        return on_gpu(qkv, rope, kv_cache, slots, num_heads, kv_scales)
    if qkv.delta is not None:
        qkv.y.copy_(qkv.joined())
    if kv_scales is None and native.serves(qkv.y.device, qkv.y.dtype):
        return native.rotate_and_store(qkv.y, rope, kv_cache, slots, num_heads)
    num_all, head_dim = num_heads + kv_cache.shape[2], kv_cache.shape[3]
    heads = qkv.y.view(len(qkv.y), num_all, head_dim)
    if rope is not None:
        rotate(heads[:, : num_all - kv_cache.shape[2] // 2], *rope)
    _store(kv_cache, heads[:, num_heads:], slots, kv_scales)


def _store(kv_cache: Tensor, kv: Tensor, slots: Tensor, kv_scales: Tensor | None) -> None:
    if kv_scales is not None:
        largest = torch.finfo(kv_cache.dtype).max
        scales = kv_scales.repeat_interleave(kv.shape[1] // 2)[:, None]
        kv = (kv.float() / scales).clamp_(-largest, largest).to(kv_cache.dtype).view(torch.uint8)
        kv_cache = kv_cache.view(torch.uint8)  # torch copies no float8 by index
    try:
        store_kv(kv_cache, kv, slots)
    except IndexError:  # a slot of -1; only padded batches have them, and looking for them first would cost every step
        is_stored = slots >= 0
        store_kv(kv_cache, kv[is_stored], slots[is_stored])
