"""Rotation and storing against their definition in float64: the twin on the CPU, the kernel on a GPU or interpreted (see
triton_marks.py)."""

from types import ModuleType
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from loray.kernels import rotary
from loray.kernels.delta import Parted
from tests.kernels.triton_marks import ALL_BACKENDS, DEVICES, DTYPES, IS_INTERPRETED, TOLERANCE

BLOCK_SIZE = 4
FP8 = torch.float8_e4m3fn


class Heads(NamedTuple):
    query: int
    kv: int
    size: int
    rotary: int  # 0 = no rotary positions


SHAPES = [
    Heads(9, 3, 64, 64),
    Heads(32, 8, 128, 128),
    Heads(4, 4, 80, 20),
    Heads(6, 2, 96, 72),
    Heads(5, 1, 256, 256),
    Heads(3, 3, 64, 16),
    Heads(12, 12, 64, 0),
    Heads(1, 1, 8, 2),
]


class Step(NamedTuple):
    """Inputs of one call, on the CPU."""

    qkv: Tensor  # [num_tokens, heads, head_dim]
    rope: tuple[Tensor, Tensor] | None
    slots: Tensor  # [num_tokens], some -1


def step_of(heads: Heads, num_tokens: int, dtype: torch.dtype) -> Step:
    qkv = torch.randn(num_tokens, heads.query + 2 * heads.kv, heads.size).to(dtype)
    angles = 100 * torch.rand(num_tokens, 1, heads.rotary // 2)
    cos, sin = torch.cat((angles.cos(), angles.cos()), -1).to(dtype), torch.cat((-angles.sin(), angles.sin()), -1).to(dtype)
    slots = torch.randperm(num_tokens + 9)[:num_tokens]
    slots[2::3] = -1
    return Step(qkv, (cos, sin) if heads.rotary else None, slots)


def kernels_of(backend: str) -> ModuleType:
    if backend == "twin" or not IS_INTERPRETED:
        return rotary
    from loray.kernels import rotary_triton

    return rotary_triton


def call(backend: str, step: Step, qkv: Parted, kv_cache: Tensor, kv_scales: Tensor | None = None) -> None:
    """qkv, its rows flat, and kv_cache are written; they and the scales are on the backend's device."""
    device = kv_cache.device
    rope = None if step.rope is None else (step.rope[0].to(device), step.rope[1].to(device))
    num_heads = step.qkv.shape[1] - kv_cache.shape[2]
    kernels_of(backend).rotate_and_store(qkv, rope, kv_cache, step.slots.to(device), num_heads, kv_scales)


def rotated(step: Step, heads: Heads) -> Tensor:
    """qkv in float64 as it must be afterwards, without a delta."""
    expected = step.qkv.double()
    if step.rope is not None:
        cos, sin = (part.double() for part in step.rope)
        turned = expected[:, : heads.query + heads.kv, : heads.rotary]
        first, second = turned.chunk(2, -1)
        turned.copy_(turned * cos + torch.cat((second, first), -1) * sin)
    return expected


def framed_qkv(step: Step, device: str) -> tuple[Tensor, Tensor]:
    """A wider tensor full of NaN, and qkv as a part of its rows."""
    num_tokens, num_all, size = step.qkv.shape
    frame = torch.full((num_tokens + 1, num_all * size + 16), float("nan"), dtype=step.qkv.dtype, device=device)
    qkv = frame[:-1, 8:-8].view(num_tokens, num_all, size)
    qkv.copy_(step.qkv)
    return frame, qkv


def empty_cache(step: Step, heads: Heads, device: str, dtype: torch.dtype) -> Tensor:
    num_blocks = (len(step.slots) + 9) // BLOCK_SIZE + 1
    return torch.full((num_blocks, BLOCK_SIZE, 2 * heads.kv, heads.size), float("nan"), device=device).to(dtype)


def stored_of(kv_cache: Tensor, step: Step) -> Tensor:
    """What lies in the slots of those tokens that have one, in float64; everywhere else must still be NaN."""
    flat = kv_cache.float().cpu().double().flatten(0, 1)
    slots = step.slots[step.slots >= 0]
    stored = flat[slots]
    flat[slots] = float("nan")
    assert flat.isnan().all()
    return stored


@pytest.mark.parametrize("backend", ALL_BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads", SHAPES, ids=str)
@pytest.mark.parametrize("num_tokens", [1, 7])
def test_queries_and_keys_turn_and_keys_and_values_are_stored(backend: str, dtype: torch.dtype, heads: Heads, num_tokens: int) -> None:
    step = step_of(heads, num_tokens, dtype)
    frame, qkv = framed_qkv(step, DEVICES[backend])
    kv_cache = empty_cache(step, heads, DEVICES[backend], dtype)
    call(backend, step, Parted(qkv.flatten(1)), kv_cache)
    expected = rotated(step, heads)
    torch.testing.assert_close(qkv.double().cpu(), expected, rtol=TOLERANCE[dtype], atol=2 * TOLERANCE[dtype])
    assert torch.equal(qkv[:, heads.query + heads.kv :].cpu(), step.qkv[:, heads.query + heads.kv :])  # values as they were
    assert torch.equal(qkv[..., heads.rotary :].cpu(), step.qkv[..., heads.rotary :])
    assert torch.equal(stored_of(kv_cache, step), qkv[:, heads.query :].double().cpu()[step.slots >= 0])
    frame[:-1, 8:-8] = float("nan")
    assert frame.isnan().all()


@pytest.mark.parametrize("backend", ALL_BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads", SHAPES, ids=str)
def test_a_float8_cache_gets_the_quotient_by_its_scale_within_its_range(backend: str, dtype: torch.dtype, heads: Heads) -> None:
    step = step_of(heads, 5, dtype)
    step.qkv[0] *= 1000
    step.qkv[1, -1] = float("inf")
    scales = torch.tensor([0.5, 0.037])
    _, qkv = framed_qkv(step, DEVICES[backend])
    kv_cache = empty_cache(step, heads, DEVICES[backend], FP8)
    call(backend, step, Parted(qkv.flatten(1)), kv_cache, scales.to(DEVICES[backend]))
    quotients = qkv[:, heads.query :].double().cpu() / scales.double().repeat_interleave(heads.kv)[:, None]
    expected = quotients.clamp(-448, 448)[step.slots >= 0]
    found = stored_of(kv_cache, step)
    assert found.abs().max() == 448
    atol = 2.0**-10
    if backend == "triton" and IS_INTERPRETED:  # it drops the carry of what is rounded up to a power of two, and the least number's half
        is_carried = expected.frexp().mantissa.abs() >= 31 / 32
        found, expected, atol = found[~is_carried], expected[~is_carried], 2.0**-9
    torch.testing.assert_close(found, expected, rtol=2.0**-4, atol=atol)  # half a unit in the last place


@pytest.mark.parametrize("backend", ALL_BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads", SHAPES, ids=str)
def test_a_delta_is_added_for_the_tokens_that_have_one_and_others_are_not_read(backend: str, dtype: torch.dtype, heads: Heads) -> None:
    step, device = step_of(heads, 4, dtype), DEVICES[backend]
    has_delta = torch.tensor([1, 0, 0, 1], dtype=torch.int32)
    delta = torch.full((4, step.qkv[0].numel() + 8), float("nan"), dtype=dtype)[:, :-8]
    delta[has_delta != 0] = torch.randn(2, delta.shape[1]).to(dtype)
    _, qkv = framed_qkv(step, device)
    kv_cache = empty_cache(step, heads, device, dtype)
    wide = torch.full((4, delta.shape[1] + 8), float("nan"), dtype=dtype, device=device)
    wide[:, :-8] = delta
    call(backend, step, Parted(qkv.flatten(1), wide[:, :-8], has_delta.to(device)), kv_cache)
    sums = (step.qkv.double() + torch.where((has_delta != 0)[:, None], delta, 0).double().view(step.qkv.shape)).to(dtype)
    expected = rotated(step._replace(qkv=sums), heads)
    torch.testing.assert_close(qkv.double().cpu(), expected, rtol=TOLERANCE[dtype], atol=3 * TOLERANCE[dtype])
    assert torch.equal(qkv[:, heads.query + heads.kv :].cpu(), sums[:, heads.query + heads.kv :])
    assert torch.equal(stored_of(kv_cache, step), qkv[:, heads.query :].double().cpu()[step.slots >= 0])


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_the_twin_is_rotate_and_store_kv_bit_for_bit(dtype: torch.dtype) -> None:
    heads = Heads(9, 3, 64, 48)
    step = step_of(heads, 6, dtype)._replace(slots=torch.randperm(15)[:6])
    qkv, kv_cache = step.qkv.clone(), empty_cache(step, heads, "cpu", dtype)
    call("twin", step, Parted(qkv.flatten(1)), kv_cache)
    expected, expected_cache = step.qkv.clone(), empty_cache(step, heads, "cpu", dtype)
    assert step.rope is not None
    rotary.rotate(expected[:, :12], *step.rope)
    rotary.store_kv(expected_cache, expected[:, 9:], step.slots)
    assert torch.equal(qkv, expected)
    torch.testing.assert_close(kv_cache, expected_cache, rtol=0, atol=0, equal_nan=True)
