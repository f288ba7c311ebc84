"""rotate against transformers' own."""

import pytest
import torch
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from loray.kernels.rotary import rotate


@pytest.mark.parametrize("rotary_dim", [16, 12])
def test_heads_turn_as_in_transformers_and_the_rest_stays(rotary_dim: int) -> None:
    x, angles = torch.randn(5, 3, 16), torch.randn(5, rotary_dim // 2)
    whole = torch.cat((angles, angles), -1)
    turned = x[None, ..., :rotary_dim].transpose(1, 2)
    expected, _ = apply_rotary_pos_emb(turned, turned, whole.cos()[None], whole.sin()[None])
    rotated = x.clone()
    rotate(rotated, whole.cos()[:, None], torch.cat((-angles.sin(), angles.sin()), -1)[:, None])
    torch.testing.assert_close(rotated[..., :rotary_dim], expected[0].transpose(0, 1))
    assert torch.equal(rotated[..., rotary_dim:], x[..., rotary_dim:])
