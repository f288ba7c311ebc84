"""Fills rank pages with adapters' matrices: on a GPU beside the steps, by one copy and one launch on a stream of its own."""

from collections.abc import Mapping, Sequence
from math import prod
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from loray.models.adapter_tensors import RankAdapter
from loray.models.device_memory import fits
from loray.models.hosted_linear import HostedLinear
from loray.models.linear import Linear
from loray.models.lora_groups import Run, page_runs

Key = tuple[str, str]  # module path and "a" or "b"


class Arrival(NamedTuple):
    """Pages on their way."""

    page_ids: frozenset[int]
    begun: torch.cuda.Event
    done: torch.cuda.Event

    def seconds(self) -> float:
        """That it took; 0 while it is not there."""
        return self.begun.elapsed_time(self.done) / 1000 if self.done.query() else 0.0


class PageWriter:
    def __init__(self, linears: Mapping[str, Linear | HostedLinear], device: torch.device) -> None:
        self._pools = dict(_pools(linears))
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._places = np.array(  # [pools, 3]: address, distance between rows, width
            [(pool.data_ptr(), pool.stride(0), pool.shape[1]) for pool in self._pools.values()], np.int64
        ).reshape(-1, 3)
        self._dtypes = {pool.dtype for pool in self._pools.values()}
        self._arrivals: list[Arrival] = []
        self._written: dict[int, frozenset[Key]] = {}  # page -> pools that have more than zeros there; all where it has never been written

    def warm_up(self) -> None:
        """Writes nothing; so the first adapter waits for no compiler."""
        if self._stream is not None and len(self._dtypes) == 1:
            no_rows = torch.tensor([[0, 0, 1, 0, 0, 0]], device=self._device)
            self._scatter(torch.empty(1, dtype=next(iter(self._dtypes)), device=self._device), no_rows, most_rows=1)

    def has_room(self, adapter: RankAdapter) -> bool:
        """Whether the device can hold what it takes to fill the pages: a copy of the adapter, and where it has more than pages, as much
        again for B with its gains and for what stays."""
        if self._stream is None:
            return True
        stream, num_copies = (self._stream, 1) if adapter.has_pages_only else (torch.cuda.current_stream(self._device), 3)
        with torch.cuda.stream(stream):  # whose memory it will be
            return fits(lambda: torch.empty(num_copies * adapter.values.nbytes, dtype=torch.uint8, device=self._device))

    def write(self, adapter: RankAdapter, page_ids: list[int]) -> Arrival | None:
        """The whole adapter. On a GPU it is under way when this comes back; see `wait`."""
        if self._stream is None or self._dtypes != {adapter.values.dtype}:  # a copy beside the steps converts nothing
            self.write_matrices(adapter.matrices(self._device), page_ids)
            return None
        begun, done = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        before = torch.cuda.current_stream(self._device).record_event()
        pieces, most_rows = self._pieces(adapter.shapes, page_ids)
        with torch.cuda.stream(self._stream):
            begun.record()
            values = adapter.values.to(self._device, non_blocking=True)
            on_device = torch.from_numpy(pieces).pin_memory().to(self._device, non_blocking=True)
            self._stream.wait_event(before)  # steps on their way may still read what was in these pages
            self._scatter(values, on_device, most_rows)
            done.record()
        self._note(page_ids, frozenset(adapter.shapes))
        self._arrivals = [other for other in self._arrivals if not other.done.query()]  # nobody need wait for those
        self._arrivals.append(arrival := Arrival(frozenset(page_ids), begun, done))
        return arrival

    def write_matrices(self, matrices: Mapping[Key, Tensor], page_ids: list[int]) -> None:
        """Those on the device; pages are zero where a pool's matrix is missing, or has no more rows. Done before the next step."""
        self.wait(page_ids)
        runs, written = page_runs(page_ids), frozenset(matrices)
        stale = frozenset[Key]().union(*(self._written.get(page, self._pools.keys()) for page in page_ids))
        for key in (key for key in self._pools if key in written or key in stale):
            fill_ranks(self._pools[key], matrices.get(key, self._pools[key][:0]), runs)
        self._note(page_ids, written)

    def wait(self, page_ids: Sequence[int]) -> None:
        """What is launched from now on finds these pages as they were written last."""
        for arrival in [arrival for arrival in self._arrivals if not arrival.page_ids.isdisjoint(page_ids)]:
            torch.cuda.current_stream(self._device).wait_event(arrival.done)
            self._arrivals.remove(arrival)

    def _note(self, page_ids: list[int], written: frozenset[Key]) -> None:
        self._written.update(dict.fromkeys(page_ids, written))

    def _pieces(self, shapes: Mapping[Key, tuple[int, int]], page_ids: list[int]) -> tuple[NDArray[np.int64], int]:
        """As kernels/page_scatter.py wants them, and the most rows of one."""
        sizes = np.array([prod(shape) for shape in shapes.values()], np.int64)
        firsts = dict(zip(shapes, (np.cumsum(sizes) - sizes).tolist(), strict=True))
        source = np.array([(firsts.get(key, 0), shapes[key][0] if key in shapes else 0) for key in self._pools], np.int64).reshape(-1, 2)
        address, stride, width = self._places.T
        found, num_before, itemsize = [], 0, next(iter(self._pools.values())).itemsize
        for start, end in page_runs(page_ids):
            num_there = np.clip(source[:, 1] - num_before, 0, end - start)
            first = np.where(num_there > 0, source[:, 0] + num_before * width, 0)
            rows = np.full_like(width, end - start)
            found.append(np.stack((address + start * stride * itemsize, stride, width, rows, first, num_there), 1))
            num_before += end - start
        return np.concatenate(found), max(end - start for start, end in page_runs(page_ids))

    def _scatter(self, values: Tensor, pieces: Tensor, most_rows: int) -> None:
        from loray.kernels.page_scatter import ALIGNMENT, scatter_pages  # needs Triton, which a machine without a GPU may lack

        address, stride, width = self._places.T
        is_aligned = not np.any(np.concatenate((address, values.element_size() * stride, values.element_size() * width)) % ALIGNMENT)
        scatter_pages(values, pieces, most_rows, int(width.max()), bool(is_aligned))


def _pools(linears: Mapping[str, Linear | HostedLinear]) -> list[tuple[Key, Tensor]]:
    """Every projection's part of the pool: [pool_ranks, inputs or outputs]."""
    pools: list[tuple[Key, Tensor]] = []
    for path, linear in linears.items():
        assert linear.lora is not None, "pages are allocated before they are written"
        for name, a, b in zip(linear.paths(path), linear.lora.a.unbind(), linear.lora.b.split(linear.widths, 1), strict=True):
            pools += [((name, "a"), a), ((name, "b"), b)]
    return pools


def fill_ranks(pool: Tensor, matrix: Tensor, runs: tuple[Run, ...]) -> None:
    """The matrix's rows into the pool's ranks of the runs; zero where it has no more."""
    first = 0
    for start, end in runs:
        rows = matrix[first : first + end - start]
        pool[start : start + len(rows)].copy_(rows)
        if start + len(rows) < end:
            pool[start + len(rows) : end].zero_()
        first += end - start
