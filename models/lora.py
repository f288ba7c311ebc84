"""The pool of rank pages on one rank: room for every linear of the model, filled with adapters. Who owns a page, the driver knows.

A page holds 8 LoRA ranks of A and B for every linear. Pages of one adapter may lie anywhere; what it does not use is zero.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn

from loray.kernels.lora import LoraPages
from loray.models.adapter import PAGE_RANK, AdapterError
from loray.models.adapter_specs import AdapterSpecs
from loray.models.adapter_tensors import RankAdapter, Target, read_rank_adapter
from loray.models.device_memory import claimed
from loray.models.host_adapters import HostAdapters
from loray.models.hosted_linear import HostedLinear
from loray.models.linear import Linear
from loray.models.page_writer import Arrival, PageWriter
from loray.models.parallel import Parallel
from loray.models.special import Special
from loray.models.special_loads import changes_of, fold_gains
from loray.models.step import AdapterLoad
from loray.models.vocabulary import Embedding, Head


@dataclass(slots=True)
class LoadTime:
    """What a step's loads took: the rank's own time, and that of copies beside the steps."""

    host_seconds: float = 0.0
    arrivals: list[Arrival] = field(default_factory=list)

    @property
    def is_over(self) -> bool:
        return all(arrival.done.query() for arrival in self.arrivals)

    def whole_seconds(self) -> float:
        """Waits for the copies."""
        for arrival in self.arrivals:
            arrival.done.synchronize()
        return self.seconds()

    def seconds(self) -> float:
        """Without the copies that are still on their way."""
        return self.host_seconds + sum(arrival.seconds() for arrival in self.arrivals)


class LoraPool:
    def __init__(self, model: nn.Module, parallel: Parallel | None = None) -> None:
        self._linears = {path: module for path, module in model.named_modules() if isinstance(module, Linear | HostedLinear)}
        self._parallel = parallel or Parallel()
        self._device = next((linear.weight.device for linear in self._linears.values()), torch.device("cpu"))
        self._targets = {
            name: Target(linear, index, linear.projections[index])
            for path, linear in self._linears.items()
            for index, name in enumerate(linear.paths(path))
        }
        for path, module in model.named_modules():
            if isinstance(module, Embedding | Head):
                self._targets[path] = Target(module, 0, module.projection)
        self._specs = AdapterSpecs(self.shapes)
        self.num_pages = 0
        self.host = HostAdapters(self._read)
        self.load_time = LoadTime()  # of the last load_all
        self.specials: dict[int, Special] = {}  # of the adapters that have more than pages, by the first of these

    @property
    def shapes(self) -> dict[str, tuple[int, int]]:
        """Module path -> (in_features, out_features) of the whole, unsharded module, linears first."""
        return {path: target.shape for path, target in self._targets.items()}

    @property
    def page_bytes(self) -> int:
        return PAGE_RANK * sum(
            (len(linear.projections) * linear.in_size + linear.out_size) * linear.weight.itemsize for linear in self._linears.values()
        )

    def allocate(self, num_pages: int) -> None:
        self.num_pages = num_pages
        for linear in self._linears.values():
            a = linear.weight.new_empty(len(linear.projections), num_pages * PAGE_RANK, linear.in_size)
            b = linear.weight.new_empty(num_pages * PAGE_RANK, linear.out_size)
            linear.lora = LoraPages(claimed(a), claimed(b), linear.widths)
        self._writer = PageWriter(self._linears, self._device)
        self._writer.warm_up()

    def load_all(self, loads: list[AdapterLoad], freed_pages: Sequence[int] = ()) -> dict[int, str]:
        """Fill the pages of each load, all of them; where the adapter cannot be read, on this rank or another, they are zero.

        Index in loads -> why it failed, for those that did, the same ones on every rank. What adapters of freed pages have beside
        them is freed too.
        """
        self.load_time = LoadTime()
        self._forget(freed_pages)
        if not loads:
            return {}
        started = time.perf_counter()
        reasons = self._load_all(loads)
        self.load_time.host_seconds = time.perf_counter() - started
        return reasons

    def wait(self, page_ids: Sequence[int]) -> None:
        """What is launched from now on finds these pages as the loads have filled them."""
        if page_ids:
            self._writer.wait(page_ids)

    def _load_all(self, loads: list[AdapterLoad]) -> dict[int, str]:
        found = [self._find(load) for load in loads]
        failed = self._parallel.any_rank([isinstance(adapter, str) for adapter in found], self._device)
        reasons = {}
        for index, (load, adapter) in enumerate(zip(loads, found, strict=True)):
            self._forget(load.page_ids)
            if isinstance(adapter, str) or failed[index]:
                reasons[index] = adapter if isinstance(adapter, str) else "another rank could not take the adapter"
                self._writer.write_matrices({}, load.page_ids)
            else:
                self._place(adapter, load.page_ids)
        return reasons

    def _read(self, folder: Path) -> RankAdapter:
        return read_rank_adapter(folder, self._specs.read(folder), self._targets, is_pinned=self._device.type == "cuda")

    def _find(self, load: AdapterLoad) -> RankAdapter | str:
        """From host memory, else from its folder; or why there is none."""
        try:
            adapter = self.host.find(load.path, load.signature) or self.host.read(load.path, load.signature)
        except AdapterError as error:
            return str(error)
        if adapter.spec.rank > len(load.page_ids) * PAGE_RANK:
            return f"adapter {Path(load.path).name!r}: rank {adapter.spec.rank} does not fit into {len(load.page_ids)} pages"
        if not self._writer.has_room(adapter):
            size = adapter.values.nbytes
            return f"adapter {Path(load.path).name!r}: the GPU has no {size} bytes left to copy it to; lower kv_cache.memory_fraction"
        return adapter

    def _forget(self, page_ids: Sequence[int]) -> None:
        for first_page, special in list(self.specials.items()):
            if not special.page_ids.isdisjoint(page_ids):
                del self.specials[first_page]

    def _place(self, adapter: RankAdapter, page_ids: list[int]) -> None:
        if adapter.has_pages_only:
            arrival = self._writer.write(adapter, page_ids)
            self.load_time.arrivals += [arrival] if arrival else []
            return
        matrices = adapter.matrices(self._device)
        gains = fold_gains(adapter, matrices, self._targets, self._parallel)
        changes = changes_of(adapter, matrices, gains, self._targets)
        self.specials[min(page_ids)] = Special(frozenset(page_ids), changes)
        self._writer.write_matrices(matrices, page_ids)
