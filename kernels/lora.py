"""Adds low-rank updates to a linear layer's output, each segment of tokens with its own adapter."""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor


class Segment(Protocol):
    """Neighbouring tokens, and the slices of pool ranks that apply to them."""

    @property
    def start(self) -> int: ...
    @property
    def end(self) -> int: ...
    @property
    def runs(self) -> tuple[slice, ...]: ...


def add_lora(y: Tensor, x: Tensor, a: Tensor, b: Tensor, widths: Sequence[int], segments: Sequence[Segment]) -> None:
    """y[segment, columns of i] += (x[segment] @ a[i, run].T) @ b[run, columns of i] for each run and each fused projection i.

    x [num_tokens, in], y [num_tokens, sum(widths)], a [len(widths), pool_ranks, in], b [pool_ranks, sum(widths)].
    """
    for segment in segments:
        x_rows, y_rows = x[segment.start : segment.end], y[segment.start : segment.end]
        for run in segment.runs:
            if len(widths) == 1:
                y_rows.addmm_(x_rows @ a[0, run].T, b[run])
                continue
            shrunk = torch.matmul(x_rows, a[:, run].transpose(1, 2))  # [len(widths), tokens of the segment, ranks of the run]
            for y_part, shrunk_part, b_part in zip(y_rows.split(widths, 1), shrunk.unbind(), b[run].split(widths, 1), strict=True):
                y_part.addmm_(shrunk_part, b_part)
