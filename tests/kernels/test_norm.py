"""Normalisation against its definition in float64: the twin on the CPU, the kernel on a GPU or interpreted (see triton_marks.py)."""

from types import ModuleType

import pytest
import torch

from loray.kernels import norm
from loray.kernels.delta import Parted
from tests.kernels.triton_marks import ALL_BACKENDS, DEVICES, DTYPES, IS_INTERPRETED, TOLERANCE, framed, is_whole

EPS = 1e-5


def kernels_of(backend: str) -> ModuleType:
    if backend == "twin" or not IS_INTERPRETED:
        return norm
    from loray.kernels import norm_triton

    return norm_triton


def expected_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    x = x.double().cpu()
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double().cpu()


def check(found: torch.Tensor, expected: torch.Tensor, atol: float = 2.0**-24) -> None:  # half of float16's smallest number
    torch.testing.assert_close(found.double().cpu(), expected, rtol=TOLERANCE[found.dtype], atol=atol)


@pytest.mark.parametrize("backend", ALL_BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "shape", [(1, 1), (1, 4096), (5, 576), (3, 100), (2, 16384), (2, 9, 64), (3, 4, 80), (1, 3, 96), (2, 2, 256)], ids=str
)
def test_each_row_is_divided_by_its_root_mean_square(backend: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    device = DEVICES[backend]
    x = (torch.randn(shape) * torch.logspace(-3, 2, shape[0]).view(-1, *(1 for _ in shape[1:]))).to(device, dtype)
    weight = torch.randn(shape[-1]).to(device, dtype)
    check(kernels_of(backend).rms_norm(x, weight, EPS), expected_norm(x, weight))


@pytest.mark.parametrize("backend", ALL_BACKENDS)
@pytest.mark.parametrize("shape", [(3, 576), (3, 5, 80)], ids=str)
def test_rows_of_a_larger_tensor_are_read_and_written_where_they_lie(backend: str, shape: tuple[int, ...]) -> None:
    frame, x = framed(torch.randn(shape), DEVICES[backend])
    out_frame, out = framed(torch.full(shape, float("nan")), DEVICES[backend])
    weight = torch.randn(shape[-1], device=DEVICES[backend])
    expected = expected_norm(x, weight)
    assert kernels_of(backend).rms_norm(x, weight, EPS, out) is out
    check(out, expected)
    kernels_of(backend).rms_norm(x, weight, EPS, x)
    check(x, expected)
    assert is_whole(frame) and is_whole(out_frame)


@pytest.mark.parametrize("backend", ALL_BACKENDS)
def test_the_quotient_is_rounded_before_the_weight(backend: str) -> None:
    """As transformers does it: the weight meets a number of the model's dtype."""
    x, weight = torch.randn(4, 64).half().to(DEVICES[backend]), (1 + torch.rand(64)).half().to(DEVICES[backend])
    quotient = expected_norm(x, torch.ones(64)).half()
    found = kernels_of(backend).rms_norm(x, weight, EPS).cpu()
    assert (found != (quotient * weight.cpu())).float().mean() < 0.02  # a few lie between two numbers
    assert (found != expected_norm(x, weight).half()).float().mean() > 0.05


@pytest.mark.parametrize("backend", ALL_BACKENDS)
def test_a_weight_in_float32_meets_the_quotient_in_float32(backend: str) -> None:
    """As Gemma has it: only the product is rounded."""
    x, weight = torch.randn(4, 64).half().to(DEVICES[backend]), (1 + torch.rand(64)).to(DEVICES[backend])
    found = kernels_of(backend).rms_norm(x, weight, EPS)
    assert found.dtype == torch.float16
    assert (found.cpu() != expected_norm(x, weight).half()).float().mean() < 0.02  # a few lie between two numbers


@pytest.mark.parametrize("backend", ALL_BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scale", [1.0, 0.22])
@pytest.mark.parametrize(("num_tokens", "size"), [(1, 4096), (7, 576), (4, 33)])
def test_the_residual_gets_the_rounded_sum_and_its_norm_is_returned(
    backend: str, dtype: torch.dtype, scale: float, num_tokens: int, size: int
) -> None:
    device = DEVICES[backend]
    (x_frame, x), (y_frame, y) = (framed(torch.randn(num_tokens, width).to(dtype), device) for width in (size, size + 8))
    y = y[:, :size]
    weight, expected = torch.randn(size).to(device, dtype), (x.double() + scale * y.double()).cpu()
    normed = kernels_of(backend).add_rms_norm(x, Parted(y), weight, EPS, scale)
    check(x, expected, atol=TOLERANCE[dtype])
    check(normed, expected_norm(x, weight))  # of the sum as it was rounded
    assert is_whole(x_frame) and is_whole(y_frame)


@pytest.mark.parametrize("backend", ALL_BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_delta_is_added_for_the_tokens_that_have_one_and_others_are_not_read(backend: str, dtype: torch.dtype) -> None:
    device, size = DEVICES[backend], 576
    x, y, weight = (torch.randn(shape).to(device, dtype) for shape in ((4, size), (4, size), (size,)))
    has_delta = torch.tensor([1, 0, 1, 0], dtype=torch.int32, device=device)
    _, delta = framed(torch.full((4, size), float("nan"), dtype=dtype), device)
    delta[has_delta != 0] = torch.randn(2, size).to(device, dtype)
    added = y.double().cpu() + torch.where((has_delta != 0)[:, None], delta, 0).double().cpu()
    expected = x.double().cpu() + 0.5 * added.to(dtype).double()
    normed = kernels_of(backend).add_rms_norm(x, Parted(y, delta, has_delta), weight, EPS, 0.5)
    check(x, expected, atol=TOLERANCE[dtype])
    check(normed, expected_norm(x, weight))


@pytest.mark.parametrize("backend", ALL_BACKENDS)
def test_every_sum_is_rounded_before_the_next_step(backend: str) -> None:
    device = DEVICES[backend]
    x, y, delta = (torch.randn(4, 576).half() for _ in range(3))
    weight, has_delta = torch.randn(576).half(), torch.ones(4, dtype=torch.int32, device=device)
    total = (x.double() + 0.75 * (y.double() + delta.double()).half().double()).half()
    expected = expected_norm(total, torch.ones(576)).half() * weight
    x = x.to(device)
    added = Parted(y.to(device), delta.to(device), has_delta)
    normed = kernels_of(backend).add_rms_norm(x, added, weight.to(device), EPS, 0.75)
    assert (x.cpu() != total).float().mean() < 0.01  # a few lie between two numbers
    assert (normed.cpu() != expected).float().mean() < 0.01
