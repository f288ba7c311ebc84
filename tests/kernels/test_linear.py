"""Linear layers over few tokens against their definition in float64, with all memory that nobody may read poisoned.

With TRITON_INTERPRET=1 the GPU's kernel runs without a GPU: `TRITON_INTERPRET=1 pytest -m gpu tests/kernels/test_linear.py`.
"""

import pytest
import torch
from torch import Tensor

from loray.kernels.linear import linear
from tests.kernels.triton_marks import DEVICES, IS_INTERPRETED, ON_GPU, REAL_GPU

DEVICE = DEVICES["triton"]
DTYPES = [torch.float16] if IS_INTERPRETED else [torch.float16, torch.bfloat16]  # numpy, which stands in for the GPU, has no bfloat16
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}  # of the largest value
SIZES = [(64, 256), (192, 512)] if IS_INTERPRETED else [(64, 256), (4096, 4096), (6144, 4096), (4096, 14336), (64, 128)]  # outputs, inputs


def case(num_tokens: int, sizes: tuple[int, int], dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor, Tensor]:
    """x, a part of rows that are longer and of a block that has more; the matrix; the bias."""
    generator = torch.Generator().manual_seed(num_tokens)
    outputs, inputs = sizes
    rows = torch.full((num_tokens + 2, inputs + 16), float("nan"))
    rows[:num_tokens, :inputs] = torch.randn(num_tokens, inputs, generator=generator)
    weight, bias = torch.randn(outputs, inputs, generator=generator), torch.randn(outputs, generator=generator)
    return rows.to(device, dtype)[:num_tokens, :inputs], weight.to(device, dtype), bias.to(device, dtype)


def assert_product(found: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    exact = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    assert found.dtype == x.dtype and found.is_contiguous()
    torch.testing.assert_close(found.double(), exact, atol=TOLERANCE[x.dtype] * float(exact.abs().max()), rtol=0)


@pytest.mark.parametrize("has_bias", [True, False])
def test_on_a_cpu_it_is_the_product(has_bias: bool) -> None:
    x, weight, bias = case(3, (64, 256), torch.float32, "cpu")
    assert_product(linear(x, weight, bias if has_bias else None), x, weight, bias if has_bias else None)


class TestKernel:
    pytestmark = ON_GPU

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize("sizes", SIZES, ids=str)
    @pytest.mark.parametrize(("num_tokens", "has_bias"), [(1, True), (8, False), (16, True), (17, False), (32, True)])
    def test_the_product_of_few_tokens(self, num_tokens: int, has_bias: bool, sizes: tuple[int, int], dtype: torch.dtype) -> None:
        from loray.kernels import linear_triton

        x, weight, bias = case(num_tokens, sizes, dtype, DEVICE)
        assert_product(linear_triton.linear(x, weight, bias if has_bias else None), x, weight, bias if has_bias else None)


class TestChoice:
    pytestmark = REAL_GPU

    def test_it_is_chosen_for_few_tokens_and_matrices_of_one_wave(self) -> None:
        from loray.kernels.linear_triton import is_faster

        def chosen(num_tokens: int, outputs: int, inputs: int, dtype: torch.dtype = torch.bfloat16) -> bool:
            x = torch.empty(num_tokens, inputs, dtype=dtype, device=DEVICE)
            return is_faster(x, torch.empty(outputs, inputs, dtype=dtype, device=DEVICE))

        assert chosen(1, 4096, 4096) and chosen(32, 6144, 4096) and chosen(8, 4096, 14336)
        assert not chosen(33, 4096, 4096) and not chosen(0, 4096, 4096)
        assert not chosen(8, 28672, 4096) and not chosen(8, 4096, 16512) and not chosen(8, 576, 576)
        assert not chosen(8, 4096, 4096, torch.float32)
