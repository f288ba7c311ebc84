"""What low-rank updates add to a linear layer's output, where it was computed beside the output and is still to be added. Plain torch."""

from typing import NamedTuple

import torch
from torch import Tensor


class Parted(NamedTuple):
    """A layer's output, and what is still to be added to it where LoRA was computed beside it: whoever reads it next adds it up."""

    y: Tensor  # [num_tokens, outputs]
    delta: Tensor | None = None  # [num_tokens, outputs]
    has_delta: Tensor | None = None  # [num_tokens] int32: where it is 0, delta is anything

    def joined(self) -> Tensor:
        """y + delta for the tokens that have one, rounded to y's dtype; y itself without delta."""
        if self.delta is None:
            return self.y
        assert self.has_delta is not None, "a delta comes with the tokens that have it"
        return (self.y + torch.where(self.has_delta.ne(0)[:, None], self.delta, 0)).to(self.y.dtype)
