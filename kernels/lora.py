"""Adds low-rank updates to a linear layer's output, each segment of tokens with its own adapter. Plain torch, for any device."""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

MAX_KEPT_RUNS = 128  # a layer keeps about 2 KB for each

Run = tuple[int, int]  # first rank and end of consecutive ranks in the pool


class Segment(Protocol):
    """Neighbouring tokens, and the ranks that apply to them. The segments of a batch follow each other without a gap."""

    @property
    def num_tokens(self) -> int: ...
    @property
    def runs(self) -> tuple[Run, ...]: ...


class LoraPages:
    """A linear layer's share of the pool of rank pages."""

    def __init__(self, a: Tensor, b: Tensor, widths: Sequence[int]) -> None:
        self.a = a  # [fused projections, pool_ranks, in]
        self.b = b  # [pool_ranks, sum(widths)], projections side by side, scale included
        self.widths = list(widths)
        self._runs: dict[Run, list[tuple[Tensor, Tensor]]] = {}

    def run(self, run: Run) -> list[tuple[Tensor, Tensor]]:
        """For each projection a transposed, [in, ranks], and b, [ranks, width]: views, kept because making them costs as
        much as a small product."""
        if run not in self._runs:
            if len(self._runs) == MAX_KEPT_RUNS:
                self._runs.clear()
            ranks = slice(*run)
            self._runs[run] = list(zip(self.a[:, ranks].mT.unbind(), self.b[ranks].split(self.widths, 1), strict=True))
        return self._runs[run]


def add_lora(y: Tensor, x: Tensor, pages: LoraPages, segments: Sequence[Segment]) -> None:
    """y[segment, columns of i] += (x[segment] @ a[i, run].T) @ b[run, columns of i] for each run and each fused projection i.

    x [num_tokens, in], y [num_tokens, sum(widths)], in place.
    """
    sizes = [segment.num_tokens for segment in segments]
    x_rows = x.split(sizes)
    y_rows = zip(*(columns.split(sizes) for columns in y.split(pages.widths, 1)), strict=True)  # of each segment, its projections
    for segment, x_part, y_parts in zip(segments, x_rows, y_rows, strict=True):
        for run in segment.runs:
            for y_part, (a, b) in zip(y_parts, pages.run(run), strict=True):
                y_part.addmm_(x_part.mm(a), b)
