"""Matrices as native_linear_arm.c and native_linear_x86.c read them, against float64."""

import pytest
import torch

from loray.kernels import free_memory, native
from loray.kernels.native_linear import NativeMatrix, pack_native
from tests.kernels.triton_marks import framed, is_whole

BACKEND = pytest.mark.parametrize("backend", ["native"])
SHAPES = [(1, 1), (33, 17), (192, 576), (5, 1000), (4100, 6), (16, 4), (40, 770)]


def pack(weight: torch.Tensor) -> NativeMatrix:
    if not native.has_linear():
        pytest.skip("no compiler, or another processor")
    packed = pack_native(weight)
    assert packed is not None
    return packed


@BACKEND
@pytest.mark.parametrize("num_tokens", [0, 1, 2, 4, 5, 7, 8, 9, 12, 13, 16, 17, 30, 70, 131])
@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
@pytest.mark.parametrize("is_half", [True, False])
def test_the_product_is_that_of_torch(backend: str, num_tokens: int, outputs: int, inputs: int, is_half: bool) -> None:
    weight = torch.randn(outputs, inputs)
    weight = weight.half().float() if is_half else weight
    _, x = framed(torch.randn(num_tokens, inputs), "cpu")
    packed = pack_native(weight)
    assert (packed is not None) == native.has_linear()
    if packed is not None:
        found, expected = packed(x), x.double() @ weight.double().T
        torch.testing.assert_close(found.double(), expected, atol=2e-6 * max(inputs, 8), rtol=1e-5)
        assert found.shape == (num_tokens, outputs)


@BACKEND
@pytest.mark.parametrize("value", [6e-8, -3e-5, 65504.0, 1e-7, 0.0])
def test_every_number_of_float16_is_read_as_it_is(backend: str, value: float) -> None:
    """The smallest, those without a leading one, and the largest."""
    weight = torch.full((20, 8), value).half().float()
    packed = pack(weight)
    assert packed(torch.eye(8)[:1]).equal(weight[:, :1].T)
    big = packed(torch.full((1, 8), 1e6))
    torch.testing.assert_close(big, torch.full((1, 20), 8e6 * float(weight[0, 0])), rtol=1e-6, atol=0)


@BACKEND
def test_numbers_that_are_none_show(backend: str) -> None:
    for value in (float("nan"), float("inf")):
        weight = torch.randn(20, 8).half().float()
        weight[3, 2] = value
        packed = pack(weight)
        for x in (torch.ones(1, 8), torch.ones(3, 8)):
            found = packed(x)
            assert not found[:, 3].isfinite().any() and found[:, :3].isfinite().all()


@BACKEND
def test_what_float16_has_is_told_from_what_it_has_not(backend: str) -> None:
    if not native.has_linear():
        pytest.skip("no compiler, or another processor")
    every = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(torch.float16).float()
    finite = every[every.isfinite()].contiguous()
    assert len(finite) == 63488 and native.is_exact_in_half(finite)
    infinity = torch.tensor(torch.inf)
    beside = torch.cat([torch.nextafter(finite, infinity), torch.nextafter(finite, -infinity), every[~every.isfinite()]])
    assert not any(native.is_exact_in_half(beside[i : i + 1]) for i in range(0, len(beside), 97))
    middle = (finite[1:1000] + finite[:999]) / 2
    for value in (*middle[::10], 65505.0, 65520.0, 1e-45, 2.0**-25, 3e38):
        finite[777] = value
        assert not native.is_exact_in_half(finite)


@BACKEND
@pytest.mark.parametrize("num_tokens", [2, 5, 11])
def test_nothing_is_written_beside_the_answer(backend: str, num_tokens: int) -> None:
    weight, x = torch.randn(37, 19), torch.randn(num_tokens, 19)
    packed = pack(weight)
    assert native._library is not None
    frame, y = framed(torch.empty(num_tokens, 37), "cpu")
    room = torch.full(((num_tokens + 7) * 19 + 8,), 5.0)
    native._library.linear(*(x.data_ptr(), 19, packed._groups.data_ptr(), 19, 37, y.data_ptr(), y.stride(0), num_tokens, room.data_ptr()))
    torch.testing.assert_close(y, x @ weight.T, atol=1e-4, rtol=1e-4)
    assert is_whole(frame) and bool((room[-8:] == 5.0).all())


@BACKEND
def test_without_room_there_is_no_second_copy(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(free_memory, "LEFT_SHARE", 1.0)
    weight = torch.randn(20, 8).half().float()
    packed = pack(weight)
    assert packed._half is None
    torch.testing.assert_close(packed(torch.ones(1, 8)), weight.sum(1)[None])


def test_without_a_compiler_matrices_stay_as_they_are() -> None:
    assert pack_native(torch.ones(4, 4)) is None
