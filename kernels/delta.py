"""What low-rank updates add to a linear layer's output, where it was computed beside the output and is still to be added. Plain torch."""

import torch
from torch import Tensor


def plus_delta(y: Tensor, delta: Tensor | None, has_delta: Tensor | None) -> Tensor:
    """y + delta for the tokens that have one, rounded to y's dtype; y itself without delta. Other rows of delta may hold anything.

    y [num_tokens, ...], delta the same or flat, has_delta [num_tokens] int32, 0 = no.
    """
    if delta is None:
        return y
    assert has_delta is not None, "a delta comes with the tokens that have it"
    is_there = has_delta.ne(0).view(-1, *(1 for _ in y.shape[1:]))
    return (y + torch.where(is_there, delta.view(y.shape), 0)).to(y.dtype)
