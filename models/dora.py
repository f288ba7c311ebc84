"""DoRA's arithmetic: how long the rows of a matrix with LoRA are. Each term sums over inputs, so ranks may add up their parts."""

import torch
from torch import Tensor

MAX_ELEMENTS = 1 << 22  # at once, of which there are some copies in float32


def squares_of(weight: Tensor, dim: int) -> Tensor:
    """||W||² along dim, in float32."""
    return torch.linalg.vector_norm(weight, dim=dim, dtype=torch.float32).square_()


def row_squares(squares: Tensor, product: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """||W + B A||² of each row = ||W||² + 2 B (A W^T) + B (A A^T) B^T, the diagonals of these.

    squares [out] of W; product [rank, out] A W^T; a [rank, in]; b [rank, out] B^T, scale included -> [out] float32
    """
    a = a.float()
    own = a @ a.T
    num_columns = max(1, MAX_ELEMENTS // len(a))  # of a head's many
    added = []
    for products, part in zip(product.split(num_columns, 1), b.split(num_columns, 1), strict=True):
        part = part.float()
        added.append((part * (2 * products.float() + own @ part)).sum(0))
    return squares + torch.cat(added)
