"""Rotates queries and keys and puts keys and values into their blocks on a GPU, one launch. Its twin in plain torch is rotary.py."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from loray.kernels.delta import Parted
from loray.kernels.delta_triton import delta_arguments, load_updated
from loray.kernels.linked import LINKED, wait_for_earlier

BLOCK, NUM_WARPS = 1024, 2  # numbers of a program: 8 in each half of the heads a thread, which are one 16-byte access


def rotate_and_store(
    qkv: Parted,
    rope: tuple[Tensor, Tensor] | None,
    kv_cache: Tensor,
    slots: Tensor,
    num_heads: int,
    kv_scales: Tensor | None = None,
) -> None:
    """qkv.y += its delta; rotate q and k in it; kv_cache[slot] = k | v, and nothing for a slot of -1. Shapes as in rotary.py."""
    y, num_tokens = qkv.y, len(qkv.y)
    num_all, head_dim = num_heads + kv_cache.shape[2], kv_cache.shape[3]
    rotary_dim = 0 if rope is None else rope[0].shape[-1]
    assert y.shape == (num_tokens, num_all * head_dim) and y.stride(1) == 1, "heads lie side by side"
    assert kv_cache.is_contiguous() and slots.is_contiguous() and len(slots) == num_tokens, "one slot for each token"
    assert rotary_dim % 2 == 0 and rotary_dim <= head_dim, "a head is turned by its halves"
    assert (kv_cache.dtype == y.dtype) == (kv_scales is None), "a cache of another dtype has scales"
    cos, sin = (y, y) if rope is None else rope
    assert cos.stride(0) == sin.stride(0) and cos.stride(-1) == 1 and sin.stride(-1) == 1
    block_heads = max(1, BLOCK // triton.next_power_of_2(head_dim))
    _rotate_and_store_kernel[(num_tokens, triton.cdiv(num_all, block_heads))](
        *(y, cos, sin, kv_cache, slots, slots if kv_scales is None else kv_scales),
        *(*delta_arguments(qkv), y.stride(0), cos.stride(0)),
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=kv_cache.shape[2] // 2,
        HEAD_DIM=head_dim,
        ROTARY_DIM=rotary_dim,
        LARGEST=0.0 if kv_scales is None else torch.finfo(kv_cache.dtype).max,
        HAS_DELTA=qkv.delta is not None,
        BLOCK_H=block_heads,
        BLOCK_HALF=max(2, triton.next_power_of_2(rotary_dim // 2)),
        BLOCK_REST=max(2, triton.next_power_of_2(head_dim - rotary_dim)),
        num_warps=NUM_WARPS,
        **LINKED,
    )


@triton.jit
def _store_kv(kv_cache, place, value, scale, is_stored, LARGEST: tl.constexpr):  # type: ignore[no-untyped-def]
    """value float32, as the model's dtype has it."""
    if LARGEST > 0.0:
        value = value / scale
        # Comparisons, so that NaN stays NaN.
        value = tl.where(value > LARGEST, LARGEST, tl.where(value < -LARGEST, -LARGEST, value))
    tl.store(kv_cache + place, value.to(kv_cache.dtype.element_ty), mask=is_stored)


@triton.jit
def _rotate_and_store_kernel(  # type: ignore[no-untyped-def]
    qkv,
    cos,
    sin,
    kv_cache,
    slots,
    kv_scales,
    delta,
    has_delta,
    delta_stride,
    qkv_stride,
    cos_stride,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    LARGEST: tl.constexpr,
    HAS_DELTA: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
):
    """One token and BLOCK_H heads, be they of q, k or v: the two halves of what is rotated side by side, then what is not."""
    wait_for_earlier()
    token = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H))[:, None]
    is_head = head < NUM_HEADS + 2 * NUM_KV_HEADS
    is_rotated = head < NUM_HEADS + NUM_KV_HEADS
    slot = tl.where(is_head & (head >= NUM_HEADS), tl.load(slots + token), -1)
    is_stored = slot >= 0
    in_cache = slot * (2 * NUM_KV_HEADS * HEAD_DIM) + (head - NUM_HEADS) * HEAD_DIM
    scale = 1.0
    if LARGEST > 0.0:
        scale = tl.where(is_rotated, tl.load(kv_scales), tl.load(kv_scales + 1))
    here, there = token * qkv_stride + head * HEAD_DIM, token * delta_stride + head * HEAD_DIM
    if ROTARY_DIM > 0:
        HALF: tl.constexpr = ROTARY_DIM // 2
        column = tl.arange(0, BLOCK_HALF)[None, :]
        is_column = column < HALF
        mask = is_head & is_column
        x1 = load_updated(qkv, here + column, delta, there + column, has_delta, token, mask, HAS_DELTA)
        x2 = load_updated(qkv, here + HALF + column, delta, there + HALF + column, has_delta, token, mask, HAS_DELTA)
        angle = token * cos_stride + column
        cos1, sin1 = tl.load(cos + angle, mask=is_column, other=0.0), tl.load(sin + angle, mask=is_column, other=0.0)
        cos2, sin2 = tl.load(cos + angle + HALF, mask=is_column, other=0.0), tl.load(sin + angle + HALF, mask=is_column, other=0.0)
        y1 = tl.where(is_rotated, x1 * cos1.to(tl.float32) + x2 * sin1.to(tl.float32), x1).to(qkv.dtype.element_ty)
        y2 = tl.where(is_rotated, x2 * cos2.to(tl.float32) + x1 * sin2.to(tl.float32), x2).to(qkv.dtype.element_ty)
        tl.debug_barrier()  # several threads may have read what one of them overwrites
        is_written = mask if HAS_DELTA else mask & is_rotated
        tl.store(qkv + here + column, y1, mask=is_written)
        tl.store(qkv + here + HALF + column, y2, mask=is_written)
        _store_kv(kv_cache, in_cache + column, y1.to(tl.float32), scale, is_stored & is_column, LARGEST)
        _store_kv(kv_cache, in_cache + HALF + column, y2.to(tl.float32), scale, is_stored & is_column, LARGEST)
    if ROTARY_DIM < HEAD_DIM:
        column = ROTARY_DIM + tl.arange(0, BLOCK_REST)[None, :]
        is_column = column < HEAD_DIM
        rest = load_updated(qkv, here + column, delta, there + column, has_delta, token, is_head & is_column, HAS_DELTA)
        if HAS_DELTA:
            tl.debug_barrier()
            tl.store(qkv + here + column, rest.to(qkv.dtype.element_ty), mask=is_head & is_column)
        _store_kv(kv_cache, in_cache + column, rest, scale, is_stored & is_column, LARGEST)
