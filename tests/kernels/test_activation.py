"""The gate against its definition in float64: the twin on the CPU, the kernel on a GPU or interpreted (see triton_marks.py)."""

import pytest
import torch
from torch import Tensor
from transformers.activations import ACT2FN

from loray.kernels.activation import KERNEL_NAMES, gate, gate_updated
from loray.kernels.delta import Parted
from loray.kernels.lora import LoraPages
from loray.models.lora_groups import lora_work
from tests.kernels.test_lora import Rows
from tests.kernels.test_lora_segments import expected_of
from tests.kernels.triton_marks import ALL_BACKENDS, DEVICES, DTYPES, IS_INTERPRETED, TOLERANCE, framed

NAMES = ["silu", "swish", "gelu", "gelu_new", "gelu_pytorch_tanh"]


def gate_of(backend: str, name: str, gate_up: Parted) -> Tensor:
    if backend == "twin" or not IS_INTERPRETED:
        return gate(ACT2FN[name], gate_up)
    from loray.kernels import activation_triton

    return activation_triton.gate(KERNEL_NAMES[type(ACT2FN[name]).__name__], gate_up)


def check(found: Tensor, name: str, gate_up: Tensor) -> None:
    gated, up = gate_up.double().cpu().chunk(2, 1)
    expected = ACT2FN[name](gated) * up
    # gelu adds 1, which loses what is small, and gelu_new rounds at every step.
    atol = TOLERANCE[found.dtype] * float(up.abs().max()) * (2 if "gelu" in name else 0.01)
    torch.testing.assert_close(found.double().cpu(), expected, rtol=TOLERANCE[found.dtype], atol=atol)


@pytest.mark.parametrize("backend", ALL_BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("num_tokens", "size"), [(1, 1), (1, 14336), (3, 1536), (5, 1025), (4, 36)])
def test_each_number_is_gated_by_its_own(backend: str, dtype: torch.dtype, name: str, num_tokens: int, size: int) -> None:
    _, gate_up = framed((3 * torch.randn(num_tokens, 2 * size)).to(dtype), DEVICES[backend])
    found = gate_of(backend, name, Parted(gate_up))
    assert found.shape == (num_tokens, size) and found.is_contiguous()
    check(found, name, gate_up)


@pytest.mark.parametrize("backend", ALL_BACKENDS)
@pytest.mark.parametrize("name", NAMES)
def test_large_numbers_saturate(backend: str, name: str) -> None:
    gate_up = torch.tensor([[1e4, -1e4, 100.0, -100.0, 0.0, 2.0, 2.0, 2.0, 2.0, 2.0]], device=DEVICES[backend])
    torch.testing.assert_close(gate_of(backend, name, Parted(gate_up)).cpu(), torch.tensor([[2e4, 0.0, 200.0, 0.0, 0.0]]))


@pytest.mark.parametrize("backend", ALL_BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_delta_is_added_for_the_tokens_that_have_one_and_others_are_not_read(backend: str, dtype: torch.dtype) -> None:
    device, size = DEVICES[backend], 1100
    gate_up = torch.randn(4, 2 * size).to(device, dtype)
    has_delta = torch.tensor([0, 1, 0, 7], dtype=torch.int32, device=device)
    _, delta = framed(torch.full((4, 2 * size), float("nan"), dtype=dtype), device)
    delta[has_delta != 0] = torch.randn(2, 2 * size).to(device, dtype)
    before = gate_up.clone()
    found = gate_of(backend, "silu", Parted(gate_up, delta, has_delta))
    check(found, "silu", (gate_up.double() + torch.where((has_delta != 0)[:, None], delta, 0).double()).to(dtype))
    assert torch.equal(gate_up, before)


@pytest.mark.parametrize("name", sorted(ACT2FN))
def test_the_twin_is_the_activation_of_transformers_bit_for_bit(name: str) -> None:
    act, gate_up = ACT2FN[name], torch.randn(3, 20)
    assert torch.equal(gate(act, Parted(gate_up.clone())), act(gate_up[:, :10]) * gate_up[:, 10:])


def test_every_activation_with_a_kernel_is_found_by_its_class() -> None:
    assert {KERNEL_NAMES[type(ACT2FN[name]).__name__] for name in NAMES} == set(KERNEL_NAMES.values())


PROMPTS: list[Rows] = [
    [(70, ((0, 8),)), (1, ()), (65, ((8, 16), (24, 48)))],
    [(3, ()), (17, ((40, 48),)), (64, ((0, 40),))],
]


@pytest.mark.parametrize("backend", ALL_BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("widths", [[36, 36], [1100, 1100], [330]], ids=str)
@pytest.mark.parametrize("rows", PROMPTS, ids=len)
@pytest.mark.parametrize(("name", "num_programs"), [("silu", 1024), ("gelu_pytorch_tanh", 1), ("gelu", 12)])
def test_updates_are_added_before_the_gate(
    backend: str, dtype: torch.dtype, widths: list[int], rows: Rows, name: str, num_programs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """num_programs: few of them take several tiles of columns each."""
    if backend == "triton":
        monkeypatch.setattr("loray.kernels.lora_gate_triton.NUM_PROGRAMS", num_programs)
    device, num_tokens = DEVICES[backend], sum(count for count, _ in rows)
    x, base = torch.randn(num_tokens, 48).to(device, dtype), torch.randn(num_tokens, sum(widths)).to(dtype)
    a, b = torch.randn(len(widths), 48, 48) / 7, torch.randn(48, sum(widths)) / 7
    pages = LoraPages(a.to(device, dtype), b.to(device, dtype), widths)
    _, y = framed(base, device)
    work = lora_work(
        [runs for _, runs in rows], [count for count, _ in rows], lambda array: torch.from_numpy(array).to(device), y.device, dtype
    )
    updated = expected_of(base, x, pages, rows)
    if backend == "twin" or not IS_INTERPRETED:
        found = gate_updated(ACT2FN[name], y, x, pages, work)
    else:
        from loray.kernels import lora_gate_triton

        found = lora_gate_triton.gate_updated(KERNEL_NAMES[type(ACT2FN[name]).__name__], y, x, pages, work)
    gated, up = updated.chunk(2, 1)
    expected = ACT2FN[name](gated) * up
    atol = 4 * TOLERANCE[dtype] * float(expected.abs().max())
    torch.testing.assert_close(found.double().cpu(), expected, rtol=0, atol=atol)
