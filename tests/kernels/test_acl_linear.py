"""Matrices as ARM's Compute Library reads them."""

import pytest
import torch

from loray.kernels import free_memory
from loray.kernels.acl_linear import HAS_ACL, pack_acl


@pytest.mark.parametrize("num_tokens", [0, 1, 2, 7, 70])
@pytest.mark.parametrize(("outputs", "inputs"), [(1, 1), (33, 17), (192, 576), (5, 1000)])
def test_the_product_is_that_of_torch(num_tokens: int, outputs: int, inputs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(free_memory, "LEFT_SHARE", 0.0)  # however full this machine's memory is
    weight, x = torch.randn(outputs, inputs), torch.randn(num_tokens, inputs + 3)[:, 1:-2]
    packed = pack_acl(weight)
    assert (packed is not None) == HAS_ACL
    if packed is not None:
        torch.testing.assert_close(packed(x).double(), x.double() @ weight.double().T, atol=2e-4, rtol=1e-5)


def test_without_room_and_for_other_dtypes_matrices_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    assert pack_acl(torch.ones(4, 4, dtype=torch.bfloat16)) is None
    assert pack_acl(torch.ones(4, 0)) is None
    monkeypatch.setattr(free_memory, "LEFT_SHARE", 1.0)
    assert pack_acl(torch.ones(4, 4)) is None
