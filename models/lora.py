"""The pool of rank pages on one rank: room for every linear of the model, filled from PEFT folders. Who owns a page, the driver knows.

A page holds 8 LoRA ranks of A and B for every linear. Pages of one adapter may lie anywhere; what it does not use is zero.
"""

from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from loray.kernels.lora import LoraPages
from loray.models.adapter import PAGE_RANK, WEIGHTS_FILE, AdapterError, AdapterModule, read_adapter, signature
from loray.models.hosted_linear import HostedLinear
from loray.models.linear import Linear, Projection
from loray.models.step import AdapterLoad


class LoraPool:
    def __init__(self, model: nn.Module) -> None:
        self._linears = {path: module for path, module in model.named_modules() if isinstance(module, Linear | HostedLinear)}
        self.num_pages = 0

    @property
    def shapes(self) -> dict[str, tuple[int, int]]:
        """Module path -> (in_features, out_features) of the whole, unsharded linear."""
        return {
            name: (projection.in_features, projection.out_features)
            for path, linear in self._linears.items()
            for name, projection in zip(linear.paths(path), linear.projections, strict=True)
        }

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
            linear.lora = LoraPages(a, b, linear.widths)

    def load_all(self, loads: list[AdapterLoad]) -> dict[int, str]:
        """Index in loads -> why it failed, for those that did."""
        reasons: dict[int, str] = {}
        for index, load in enumerate(loads):
            try:
                _check_signature(load)
                self.load(Path(load.path), load.page_ids)
                _check_signature(load)
            except AdapterError as error:
                reasons[index] = str(error)
        return reasons

    def load(self, folder: Path, page_ids: list[int]) -> None:
        """Fill these pages, all of them; when the adapter cannot be read, they are zero."""
        self._clear(page_ids)
        spec = read_adapter(folder, self.shapes)
        if spec.rank > len(page_ids) * PAGE_RANK:
            raise AdapterError(f"adapter {folder.name!r}: rank {spec.rank} does not fit into {len(page_ids)} pages")
        try:
            with safe_open(folder / WEIGHTS_FILE, "pt") as file:
                for path, linear in self._linears.items():
                    for index, name in enumerate(linear.paths(path)):
                        if name in spec.modules:
                            self._fill(linear, index, _read(file, spec.modules[name], linear.projections[index]), page_ids)
        except (SafetensorError, OSError) as error:
            self._clear(page_ids)
            raise AdapterError(f"adapter {folder.name!r}: {WEIGHTS_FILE} cannot be read: {error}") from error

    def _clear(self, page_ids: list[int]) -> None:
        for linear in self._linears.values():
            assert linear.lora is not None, "pages are loaded before they are allocated"
            ranks = _pool_ranks(page_ids).to(linear.weight.device)
            linear.lora.a.index_fill_(1, ranks, 0)
            linear.lora.b.index_fill_(0, ranks, 0)

    @staticmethod
    def _fill(linear: Linear | HostedLinear, index: int, matrices: tuple[Tensor, Tensor], page_ids: list[int]) -> None:
        assert linear.lora is not None
        a, b = (matrix.to(linear.weight.device, linear.weight.dtype) for matrix in matrices)
        ranks = _pool_ranks(page_ids)[: len(a)].to(linear.weight.device)
        linear.lora.a[index].index_copy_(0, ranks, a)
        linear.lora.b.split(linear.widths, 1)[index].index_copy_(0, ranks, b)


def _check_signature(load: AdapterLoad) -> None:
    if load.signature and load.signature != signature(Path(load.path)):
        raise AdapterError(f"adapter {Path(load.path).name!r}: its files changed after they were checked")


def _pool_ranks(page_ids: list[int]) -> Tensor:
    """[len(page_ids) * 8] the pages' ranks in the pool."""
    return (torch.tensor(page_ids)[:, None] * PAGE_RANK + torch.arange(PAGE_RANK)).flatten()


def _read(file: safe_open, module: AdapterModule, projection: Projection) -> tuple[Tensor, Tensor]:
    """This rank's part of A [rank, inputs] and of scale * B^T [rank, outputs]."""
    a = file.get_slice(module.a_name)[:, projection.in_part.slice]
    b = torch.cat([file.get_slice(module.b_name)[part.slice] for part in projection.out_parts])
    return a, b.T.float() * module.scale
