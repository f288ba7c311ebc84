"""The product of a linear layer. torch's own, except for few tokens on a GPU, where linear_triton.py reads the matrix faster."""

import torch.nn.functional as F
from torch import Tensor

from loray.kernels import native


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x W^T + bias: [num_tokens, in], [out, in], [out] -> [num_tokens, out]"""
    if x.is_cuda:
        from loray.kernels import linear_triton  # needs Triton, which a machine without a GPU may lack

        if linear_triton.is_faster(x, weight):
            return linear_triton.linear(x, weight, bias)
    return F.linear(x, weight, bias)


def add_bias(y: Tensor, bias: Tensor) -> Tensor:
    """y += bias in place. [num_tokens, out], [out]"""
    if native.serves(y.device, y.dtype):
        native.add_bias(y, bias)
        return y
    return y.add_(bias)
