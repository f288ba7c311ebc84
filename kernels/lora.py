"""Adds low-rank updates to a linear layer's output, each token with its own adapter. Plain torch; on a GPU lora_segments.py does it.

What costs here is the number of small products, so adapters are taken together: where they lie in the pool one after another, or
equally large ones at equal distances, their matrices are one strided view and one batched product serves them all.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from loray.kernels import native
from loray.kernels.delta import Parted

MAX_KEPT_VIEWS = 128  # a layer keeps about 2 KB for each
SHORT_BLOCK, LONG_BLOCK = 16, 64  # tokens of one block on a GPU


class PoolView(NamedTuple):
    """`num_chunks` times `size` consecutive ranks of the pool, `stride` ranks apart, the first at `start`."""

    start: int
    size: int
    stride: int
    num_chunks: int


class Padding(NamedTuple):
    """How the tokens of unequal chunks are laid out as equally many for each, and brought back."""

    places: Tensor  # [num_chunks * longest] for each padded token of each chunk a place among the group's tokens
    parts: Tensor  # [real tokens of all chunks] places in `places`, those of one token together
    first_parts: Tensor  # [tokens] where each token's begin


@dataclass(frozen=True, slots=True)
class LoraGroup:
    """Neighbouring tokens, and the ranks that apply to them: those of `view`, where an adapter has one chunk or several."""

    tokens: slice
    view: PoolView
    padding: Padding | None  # None = every adapter has one chunk and equally many tokens


@dataclass(frozen=True, slots=True)
class LoraSegments:
    """Neighbouring tokens of one adapter, cut into blocks, and the adapters' pages, one adapter's after another's.

    Long blocks have every token, those of the base model with no pages; short ones the adapters' alone."""

    blocks: Tensor  # [num_blocks, 4] int32: first token, number of tokens (0 = none), first place in page_ids, number of pages
    page_ids: Tensor  # [pages of all adapters] int32
    is_updated: Tensor  # [num_tokens] int32: 1 for the tokens of adapters
    block_tokens: int  # the most tokens of a block: SHORT_BLOCK or LONG_BLOCK
    max_pages: int  # of one adapter
    page_rank: int  # ranks of a page
    stream: "torch.cuda.Stream | None" = None  # where updates are computed beside the product with the base weight; None = after it


LoraWork = tuple[LoraGroup, ...] | LoraSegments  # of one step: groups on a CPU, segments on a GPU; empty groups = nothing to add


class LoraPages:
    """A linear layer's share of the pool of rank pages."""

    def __init__(self, a: Tensor, b: Tensor, widths: Sequence[int]) -> None:
        self.a = a  # [fused projections, pool_ranks, in]
        self.b = b  # [pool_ranks, sum(widths)], projections side by side, scale included
        self.widths = list(widths)
        self._views: dict[PoolView, list[tuple[Tensor, Tensor]]] = {}

    def matrices(self, view: PoolView) -> list[tuple[Tensor, Tensor]]:
        """For each projection a transposed, [num_chunks, in, size], and b, [num_chunks, size, width]: views, kept because making them
        costs as much as a small product."""
        if view not in self._views:
            if len(self._views) == MAX_KEPT_VIEWS:
                self._views.clear()
            a = [_strided(a, view).mT for a in self.a.unbind()]
            self._views[view] = list(zip(a, _strided(self.b, view).split(self.widths, 2), strict=True))
        return self._views[view]


def _strided(matrix: Tensor, view: PoolView) -> Tensor:
    """[pool_ranks, n] -> [num_chunks, size, n]"""
    n = matrix.shape[1]
    return matrix.as_strided((view.num_chunks, view.size, n), (view.stride * n, n, 1), matrix.storage_offset() + view.start * n)


def add_lora(y: Tensor, x: Tensor, pages: LoraPages, work: LoraWork) -> None:
    """y[t, columns of i] += (x[t] @ a[i, ranks of t].T) @ b[ranks of t, columns of i] for each token t and each fused projection i.

    x [num_tokens, in], y [num_tokens, sum(widths)], in place.
    """
    if isinstance(work, LoraSegments):
        if native.serves(y.device, y.dtype):
            tables = work.blocks, work.page_ids, work.page_rank, work.max_pages
            return native.add_lora(y, x, pages.a, pages.b, pages.widths, *tables)
        from loray.kernels.lora_segments import add_lora_segments  # needs Triton, which a machine without a GPU may lack

        return add_lora_segments(y, x, pages, work)
    for group in work:
        x_part = x[group.tokens]
        if group.padding is not None:
            x_part = x_part.index_select(0, group.padding.places)
        x_part = x_part.view(group.view.num_chunks, len(x_part) // group.view.num_chunks, x.shape[1])
        for y_part, (a, b) in zip(y[group.tokens].split(pages.widths, 1), pages.matrices(group.view), strict=True):
            delta = x_part.bmm(a).bmm(b).flatten(0, 1)
            if group.padding is not None:  # a sum over bags of rows: a third of index_add_'s time, and always in the same order
                delta = torch.embedding_bag(delta, group.padding.parts, group.padding.first_parts, False, 0)[0]
            y_part.add_(delta)


def lora_beside(x: Tensor, pages: LoraPages, segments: LoraSegments, product: Callable[[], Tensor]) -> Parted:
    """The product with the base weight, and at the same time, on a stream of its own, what LoRA adds to it."""
    from loray.kernels.lora_segments import lora_update

    assert segments.stream is not None
    main = torch.cuda.current_stream()
    is_ready = main.record_event()
    y = product()  # launched first, it has the multiprocessors first: it takes longest
    segments.stream.wait_event(is_ready)
    try:
        with torch.cuda.stream(segments.stream):
            delta = lora_update(x, pages, segments)
    finally:  # out of memory, too: a capture ends in another error where its streams are not joined
        main.wait_stream(segments.stream)
    return Parted(y, delta, segments.is_updated)
