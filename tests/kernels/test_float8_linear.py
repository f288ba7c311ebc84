"""Products in float8 against float64: the twin on the CPU, the kernel on a GPU or interpreted (see triton_marks.py)."""

from types import ModuleType

import pytest
import torch
from torch import Tensor

from loray.kernels import float8_linear
from loray.kernels.float8_linear import FLOAT8, Float8Matrix, pack_float8, quantise_rows
from tests.kernels.triton_marks import BACKENDS, DEVICES, DTYPES, IS_INTERPRETED, REAL_GPU, TOLERANCE, framed, is_whole

HALF_UNIT = 2.0**-4  # of a number's last place in float8, relative to the number
LEAST_HALF = 2.0**-10  # the same of the smallest numbers
SHAPES = [(1, 16), (1, 4096), (17, 48), (17, 16), (3, 4112), (5, 11008), (2, 1)]


def kernels_of(backend: str) -> ModuleType:
    if backend == "twin" or not IS_INTERPRETED:
        return float8_linear
    from loray.kernels import float8_linear_triton

    return float8_linear_triton


def rows_of(shape: tuple[int, int]) -> Tensor:
    """Some small, some large, one zero where there are several."""
    x = torch.randn(shape) * torch.logspace(-6, 3, shape[0])[:, None]
    x[1:2] = 0
    return x


def check_quantised(values: Tensor, scales: Tensor, x: Tensor, is_interpreted: bool = False) -> None:
    assert values.dtype == FLOAT8 and values.is_contiguous() and values.shape == x.shape
    assert scales.dtype == torch.float32 and scales.is_contiguous() and scales.shape == (len(x), 1)
    values, scales, x = values.float().double().cpu(), scales.double().cpu(), x.double().cpu()
    assert (scales > 0).all() and values.isfinite().all()
    torch.testing.assert_close(scales, (x.abs().amax(1, keepdim=True) / 448).clamp(min=2.0**-126), rtol=1e-6, atol=0)
    expected, least = x / scales, LEAST_HALF
    if is_interpreted:  # it drops the carry of what is rounded up to a power of two, and the least number's half
        is_carried = expected.frexp().mantissa.abs() >= 31 / 32
        values, expected, least = values[~is_carried], expected[~is_carried], 2 * LEAST_HALF
    torch.testing.assert_close(values, expected, rtol=HALF_UNIT, atol=least * 1.001)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_each_row_is_divided_by_its_own_scale_and_rounded_to_float8(backend: str, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    frame, x = framed(rows_of(shape).to(dtype), DEVICES[backend])
    check_quantised(*kernels_of(backend).quantise_rows(x), x, is_interpreted=backend == "triton" and IS_INTERPRETED)
    assert is_whole(frame)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_largest_number_of_a_row_whatever_its_sign_becomes_the_largest_of_float8(backend: str) -> None:
    x = torch.rand(3, 5000)
    x[0, 4999], x[1, 0], x[2, 4096] = -7.3, 1e-30, 3e38
    values, _ = kernels_of(backend).quantise_rows(x.to(DEVICES[backend]))
    assert values.float().abs().amax(1).tolist() == [448.0] * 3
    assert values[0, 4999].item() == -448.0


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("odd", [float("nan"), float("inf"), float("-inf")])
def test_what_is_no_finite_number_spoils_its_own_row_alone(backend: str, odd: float) -> None:
    x = torch.ones(3, 48)
    x[1, 47] = odd
    _, scales = kernels_of(backend).quantise_rows(x.to(DEVICES[backend]))
    assert scales.isfinite().tolist() == [[True], [False], [True]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("num_tokens", [1, 17])
@pytest.mark.parametrize(("outputs", "inputs"), [(16, 16), (48, 48), (112, 4096), (4096, 16)])
def test_the_twin_is_the_product_of_what_was_rounded(dtype: torch.dtype, num_tokens: int, outputs: int, inputs: int) -> None:
    x, weight = rows_of((num_tokens, inputs)).to(dtype), rows_of((outputs, inputs)).to(dtype)
    matrix = Float8Matrix(weight)
    values, scales = quantise_rows(x)
    exact = (values.double() * scales.double()) @ (matrix.weight.double() * matrix.scales.T.double()).T
    found = matrix(x)
    assert found.dtype == dtype and found.isfinite().all() and (found[:, 1] == 0).all()
    # A sum's own rounding counts by its largest terms.
    size = (values.double() * scales.double()).abs() @ (matrix.weight.double() * matrix.scales.T.double()).abs().T
    is_near = (found.double() - exact).abs() <= TOLERANCE[dtype] * exact.abs() + 1e-6 * size + torch.finfo(dtype).smallest_normal
    assert is_near.all()


@pytest.mark.parametrize("num_tokens", [1, 17])
@pytest.mark.parametrize("inputs", [16, 48, 4096])
def test_the_product_is_near_that_of_the_numbers_before_they_were_rounded(num_tokens: int, inputs: int) -> None:
    x, weight = torch.randn(num_tokens, inputs), torch.randn(64, inputs)
    exact = x.double() @ weight.double().T
    error = (pack_float8(weight)(x).double() - exact).abs()  # type: ignore[misc]
    limit = x.double().abs() @ weight.double().abs().T * ((1 + HALF_UNIT) ** 2 - 1 + 1e-3)  # 1e-3: the smallest numbers of a row
    assert (error <= limit).all()
    assert 0 < error.square().mean().sqrt() < 0.06 * inputs**0.5  # 0.037 where the errors of all numbers are independent


def test_a_matrix_has_one_byte_an_element_and_a_scale_a_row() -> None:
    matrix = pack_float8(torch.randn(48, 32).bfloat16())
    assert matrix is not None
    assert matrix.weight.nbytes == 48 * 32 and matrix.scales.shape == (1, 48) and matrix.scales.dtype == torch.float32
    assert matrix.weight.t().stride() == (1, 32)  # by columns, as torch's product takes it


@pytest.mark.parametrize("shape", [(16, 24), (24, 16), (101, 48), (0, 16)], ids=str)
def test_sizes_that_torch_has_no_product_for_stay_as_they_are(shape: tuple[int, int]) -> None:
    assert pack_float8(torch.randn(shape)) is None


GPU_SHAPES = [(1, 16, 16), (17, 48, 112), (8, 4096, 6144), (32, 14336, 4096), (128, 4096, 28672), (300, 14336, 4096), (1, 9216, 3072)]


def bfloat16_case(num_tokens: int, inputs: int, outputs: int) -> tuple[Tensor, Float8Matrix, Tensor]:
    """On the GPU: inputs, matrix, and the product in float64 of what both were rounded to."""
    x, weight = (torch.randn(size, inputs, device="cuda", dtype=torch.bfloat16) for size in (num_tokens, outputs))
    x[-1:] *= 100
    matrix = Float8Matrix(weight)
    values, scales = quantise_rows(x)
    return x, matrix, (values.double() * scales.double()) @ (matrix.weight.double() * matrix.scales.T.double()).T


class TestOnGpu:
    pytestmark = REAL_GPU

    @pytest.mark.parametrize("has_row_scales", [True, False])
    @pytest.mark.parametrize("shape", GPU_SHAPES, ids=str)
    def test_the_product_is_that_of_what_was_rounded(self, shape: tuple[int, int, int], has_row_scales: bool) -> None:
        x, matrix, exact = bfloat16_case(*shape)
        if not has_row_scales:
            matrix._has_row_scales = False
        found = matrix(x)
        assert found.dtype == torch.bfloat16
        # Fast sums keep some 13 bits of their terms, and of long ones few are exact.
        error = (found.double() - exact) / exact.square().mean(1, keepdim=True).sqrt()
        assert error.abs().max() < 0.06 and error.square().mean().sqrt() < 0.01

    @pytest.mark.parametrize("shape", [(8, 4096, 6144), (32, 14336, 4096)], ids=str)
    def test_a_graph_replays_it_with_other_inputs(self, shape: tuple[int, int, int]) -> None:
        x, matrix, _ = bfloat16_case(*shape)
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            matrix(x)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = matrix(x)
        x.copy_(torch.randn_like(x) * 3)
        graph.replay()
        torch.cuda.synchronize()
        expected = matrix(x).float()
        torch.testing.assert_close(y.float(), expected, rtol=TOLERANCE[torch.bfloat16], atol=0.01 * expected.std().item())
