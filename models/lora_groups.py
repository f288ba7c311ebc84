"""Puts a step's tokens into groups whose adapters can be multiplied at once. Host arithmetic; the products are in kernels/lora.py."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from loray.kernels import native
from loray.kernels.choice import uses_triton
from loray.kernels.lora import LONG_BLOCK, SHORT_BLOCK, LoraGroup, LoraSegments, LoraWork, Padding, PoolView
from loray.models.adapter import PAGE_RANK
from loray.models.special import Special, SpecialRows

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


def sort_key(runs: tuple[Run, ...]) -> int:
    """Brings the base model's tokens first, then adapters as they lie in the pool, so that neighbours can share a group."""
    return runs[0][0] if runs else -1


class _Draft:
    """A group in the making: one run of ranks for each adapter, and how many tokens each adapter has."""

    def __init__(self, first_token: int, run: Run, count: int) -> None:
        self.first_token = first_token
        self.runs = [run]
        self.counts = [count]
        self.stride = self._num_ranks = run[1] - run[0]
        self.is_gapless = self.is_regular = True  # regular: equally large, at equal distances, rising
        self._longest, self._work = count, count * self._num_ranks

    def add(self, run: Run, count: int) -> bool:
        """Take one more adapter, if that leaves the group one view, with little padding."""
        size, distance = run[1] - run[0], run[0] - self.runs[-1][0]
        is_gapless = self.is_gapless and run[0] == self.runs[-1][1]
        is_equal = size == self.runs[0][1] - self.runs[0][0] and distance > 0
        is_regular = self.is_regular and is_equal and (len(self.runs) == 1 or distance == self.stride)
        longest, num_ranks, work = max(self._longest, count), self._num_ranks + size, self._work + count * size
        if not (is_gapless or is_regular) or longest * num_ranks > MAX_PADDING * work:
            return False
        self.runs.append(run)
        self.counts.append(count)
        self.stride = distance
        self.is_gapless, self.is_regular = is_gapless, is_regular
        self._longest, self._num_ranks, self._work = longest, num_ranks, work
        return True


def lora_work(
    runs: list[tuple[Run, ...]],
    num_tokens: list[int],
    upload: Callable[[NDArray[np.int64]], Tensor],
    device: torch.device,
    dtype: torch.dtype,
) -> LoraWork:
    """For the rows of a step in their order: the runs of each row's adapter, and its number of tokens."""
    if not any(runs):
        return ()
    has_kernel = uses_triton(device) or native.serves(device, dtype)
    return lora_segments(runs, num_tokens, upload) if has_kernel else tuple(lora_groups(runs, num_tokens, upload))


class SegmentTables(NamedTuple):
    """What LoraSegments has, on the host."""

    blocks: list[tuple[int, int, int, int]]
    page_ids: list[int]
    is_updated: NDArray[np.int64]


def segment_tables(runs: list[tuple[Run, ...]], num_tokens: list[int], block_tokens: int) -> SegmentTables:
    tables = SegmentTables([], [], np.zeros(sum(num_tokens), np.int64))
    for first, count, row_runs in _segments(runs, num_tokens):
        if row_runs or block_tokens == LONG_BLOCK:
            pages = _pages(row_runs)
            tables.is_updated[first : first + count] = bool(row_runs)
            starts = range(0, count, block_tokens)
            tables.blocks.extend((first + start, min(block_tokens, count - start), len(tables.page_ids), len(pages)) for start in starts)
            tables.page_ids.extend(pages)
    return tables


def lora_segments(runs: list[tuple[Run, ...]], num_tokens: list[int], upload: Callable[[NDArray[np.int64]], Tensor]) -> LoraSegments:
    longest = max(count for _, count, row_runs in _segments(runs, num_tokens) if row_runs)
    block_tokens = SHORT_BLOCK if longest <= SHORT_BLOCK else LONG_BLOCK
    tables = segment_tables(runs, num_tokens, block_tokens)
    return LoraSegments(
        blocks=upload(np.array(tables.blocks, np.int64)).int(),
        page_ids=upload(np.array(tables.page_ids, np.int64)).int(),
        is_updated=upload(tables.is_updated).int(),
        block_tokens=block_tokens,
        max_pages=max(num_pages for *_, num_pages in tables.blocks),
        page_rank=PAGE_RANK,
    )


def _pages(runs: tuple[Run, ...]) -> list[int]:
    return [page for start, end in runs for page in range(start // PAGE_RANK, end // PAGE_RANK)]


def lora_groups(runs: list[tuple[Run, ...]], num_tokens: list[int], upload: Callable[[NDArray[np.int64]], Tensor]) -> Iterator[LoraGroup]:
    draft: _Draft | None = None
    for first_token, count, row_runs in _segments(runs, num_tokens):
        if draft and len(row_runs) == 1 and draft.add(row_runs[0], count):
            continue
        if draft:
            yield _group(draft, upload)
        drafts = [_Draft(first_token, run, count) for run in row_runs]
        draft = drafts.pop() if len(drafts) == 1 else None
        for scattered in drafts:
            yield _group(scattered, upload)
    if draft:
        yield _group(draft, upload)


def special_rows(
    runs: Sequence[tuple[Run, ...]], num_tokens: Sequence[int], samples: Sequence[int], specials: Mapping[int, Special]
) -> Iterator[SpecialRows]:
    """For the rows of a step in their order: the runs of each row's adapter, its number of tokens, and of those whose logits are wanted."""
    if not specials:
        return
    token = sample = 0
    for row_runs, count, is_sample in zip(runs, num_tokens, samples, strict=True):
        special = specials.get(row_runs[0][0] // PAGE_RANK) if row_runs else None
        if special is not None:
            yield SpecialRows(slice(token, token + count), slice(sample, sample + is_sample), special)
        token, sample = token + count, sample + is_sample


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
    """One chunk an adapter where all are equally large, else as many as it has of the largest size that divides all."""
    sizes = [end - start for start, end in draft.runs]
    size = math.gcd(*sizes)
    chunks = np.array(sizes, np.int64) // size
    view = PoolView(draft.runs[0][0], size, draft.stride if draft.is_regular else size, int(chunks.sum()))
    counts = np.array(draft.counts, np.int64)
    tokens = slice(draft.first_token, draft.first_token + int(counts.sum()))
    if draft.is_regular and (counts == counts[0]).all():
        return LoraGroup(tokens, view, None)
    longest, last_chunks = counts.max(), chunks.cumsum()
    tokens_before, chunks_before = np.repeat(counts.cumsum() - counts, chunks), last_chunks - chunks
    steps = np.minimum(np.arange(longest), np.repeat(counts - 1, chunks)[:, None])  # padded with the adapter's own last token
    step = np.arange(counts.sum()) - np.repeat(counts.cumsum() - counts, counts)  # of each token, among its adapter's
    num_parts = np.repeat(chunks, counts)  # of each token: one for each chunk of its adapter
    first_parts = num_parts.cumsum() - num_parts
    chunk = np.arange(num_parts.sum()) - np.repeat(first_parts - np.repeat(chunks_before, counts), num_parts)
    parts = chunk * longest + np.repeat(step, num_parts)
    return LoraGroup(tokens, view, Padding(upload((tokens_before[:, None] + steps).ravel()), upload(parts), upload(first_parts)))
