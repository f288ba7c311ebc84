"""Puts a step's tokens into groups whose adapters can be multiplied at once. Host arithmetic; the products are in kernels/lora.py."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from loray.kernels.lora import LoraGroup, PoolView
from loray.models.adapter import PAGE_RANK

Run = tuple[int, int]  # first rank and end of consecutive ranks in the pool
MAX_PADDING = 1.5  # a group may compute this many times its tokens: padding costs less than another call, up to a point


def page_runs(page_ids: list[int]) -> tuple[Run, ...]:
    """The pages' ranks in the pool, neighbouring pages joined. Their order does not matter: the sum over ranks is the same."""
    runs: list[Run] = []
    for page in sorted(page_ids):
        start, end = page * PAGE_RANK, (page + 1) * PAGE_RANK
        if runs and runs[-1][1] == start:
            runs[-1] = (runs[-1][0], end)
        else:
            runs.append((start, end))
    return tuple(runs)


def sort_key(runs: tuple[Run, ...]) -> tuple[int, int]:
    """Brings the base model's tokens first, then adapters that can share a group."""
    return (runs[0][1] - runs[0][0], runs[0][0]) if runs else (0, 0)


@dataclass(slots=True)
class _Draft:
    """A group in the making: one run of ranks for each adapter, and how many tokens each adapter has."""

    first_token: int
    starts: list[int]
    size: int
    counts: list[int]

    def takes(self, start: int, size: int, count: int) -> bool:
        """Whether one more adapter keeps the distances equal and the padding small."""
        distance = start - self.starts[-1]
        if size != self.size or distance <= 0 or (len(self.starts) > 1 and distance != self.starts[1] - self.starts[0]):
            return False
        counts = [*self.counts, count]
        return max(counts) * len(counts) <= MAX_PADDING * sum(counts)


def lora_groups(runs: list[tuple[Run, ...]], num_tokens: list[int], upload: Callable[[NDArray[np.int64]], Tensor]) -> Iterator[LoraGroup]:
    """For the rows of a step in their order: the runs of each row's adapter, and its number of tokens."""
    draft: _Draft | None = None
    for first_token, count, row_runs in _segments(runs, num_tokens):
        if draft and len(row_runs) == 1 and draft.takes(row_runs[0][0], row_runs[0][1] - row_runs[0][0], count):
            draft.starts.append(row_runs[0][0])
            draft.counts.append(count)
            continue
        if draft:
            yield _group(draft, upload)
        drafts = [_Draft(first_token, [start], end - start, [count]) for start, end in row_runs]
        draft = drafts.pop() if len(drafts) == 1 else None
        for scattered in drafts:
            yield _group(scattered, upload)
    if draft:
        yield _group(draft, upload)


def _segments(runs: list[tuple[Run, ...]], num_tokens: list[int]) -> Iterator[tuple[int, int, tuple[Run, ...]]]:
    """(first token, tokens, runs) of each adapter's neighbouring rows; the base model's are nobody's."""
    first_token = row = 0
    while row < len(runs):
        end = row
        while end < len(runs) and runs[end] == runs[row]:
            end += 1
        count = sum(num_tokens[row:end])
        yield first_token, count, runs[row]
        first_token, row = first_token + count, end


def _group(draft: _Draft, upload: Callable[[NDArray[np.int64]], Tensor]) -> LoraGroup:
    stride = draft.starts[1] - draft.starts[0] if len(draft.starts) > 1 else draft.size
    view = PoolView(draft.starts[0], draft.size, stride, len(draft.starts))
    counts = np.array(draft.counts, np.int64)
    total, longest = int(counts.sum()), int(counts.max())
    tokens = slice(draft.first_token, draft.first_token + total)
    if total == longest * len(counts):
        return LoraGroup(tokens, view, None, None)
    steps = np.arange(longest)
    is_real = steps < counts[:, None]
    places = (counts.cumsum() - counts)[:, None] + np.minimum(steps, counts[:, None] - 1)  # padded with the adapter's last token
    return LoraGroup(tokens, view, upload(places.ravel()), upload(is_real.ravel().nonzero()[0]))
