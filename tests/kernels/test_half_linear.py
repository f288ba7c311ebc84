"""Matrices in float16, products in float32."""

import pytest
import torch

from loray.kernels.half_linear import HAS_HALF_LINEAR, pack_half


@pytest.mark.parametrize("num_tokens", [1, 7, 70])
@pytest.mark.parametrize(("outputs", "inputs"), [(1, 1), (33, 17), (192, 576), (5, 1000)])
def test_the_product_is_that_of_float32(num_tokens: int, outputs: int, inputs: int) -> None:
    weight = torch.randn(outputs, inputs).half().float()
    x = torch.randn(num_tokens, inputs)
    packed = pack_half(weight)
    assert (packed is not None) == HAS_HALF_LINEAR
    if packed is not None:
        torch.testing.assert_close(packed(x).double(), x.double() @ weight.double().T, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("odd", [1 + 2.0**-12, 1e5, float("nan"), 1e-8])
def test_a_number_that_float16_does_not_have_keeps_the_matrix_in_float32(odd: float) -> None:
    weight = torch.ones(4, 4)
    weight[2, 1] = odd
    assert pack_half(weight) is None


def test_other_dtypes_stay_as_they_are() -> None:
    assert pack_half(torch.ones(4, 4, dtype=torch.bfloat16)) is None
