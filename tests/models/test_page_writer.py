"""What pages hold after any order of adapters: the last one's matrices, and zeros."""

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from loray.kernels.lora import LoraPages
from loray.models.adapter import AdapterSpec
from loray.models.adapter_tensors import RankAdapter
from loray.models.lora_groups import PAGE_RANK, page_runs
from loray.models.page_writer import Key, PageWriter
from tests.kernels.triton_marks import REAL_GPU

NUM_PAGES, IN, WIDTHS = 6, 3, [2, 4]
NAMES = ("first", "second")
NO_MODULES = AdapterSpec(
    rank=1, modules={}, beyond_pages=frozenset(), biases={}, tokens={}, has_same_tokens=False, copies={}, extra_bytes=0, places={}
)


def linears(device: torch.device) -> dict[str, Any]:
    """Two, each of two projections, with pages that hold what memory happens to hold."""

    def linear() -> Any:
        a = torch.full((len(WIDTHS), NUM_PAGES * PAGE_RANK, IN), torch.nan, device=device)
        b = torch.full((NUM_PAGES * PAGE_RANK, sum(WIDTHS)), torch.nan, device=device)
        return SimpleNamespace(lora=LoraPages(a, b, WIDTHS), widths=WIDTHS, paths=lambda path: [f"{path}.{name}" for name in NAMES])

    return {path: linear() for path in ("x", "y")}


def pools(layers: dict[str, Any]) -> dict[Key, Tensor]:
    found = {}
    for path, layer in layers.items():
        for number, name in enumerate(layer.paths(path)):
            found[name, "a"] = layer.lora.a[number]
            found[name, "b"] = layer.lora.b.split(WIDTHS, 1)[number]
    return found


def adapter_of(matrices: dict[Key, Tensor]) -> RankAdapter:
    values = torch.cat([torch.empty(0), *(matrix.flatten() for matrix in matrices.values())])
    shapes = {key: (matrix.shape[0], matrix.shape[1]) for key, matrix in matrices.items()}
    return RankAdapter(NO_MODULES, values, shapes, vectors={}, squares={})


@pytest.mark.parametrize("device", [torch.device("cpu"), pytest.param(torch.device("cuda"), marks=REAL_GPU)], ids=str)
def test_pages_hold_the_last_adapter_and_zeros_whatever_was_there(device: torch.device) -> None:
    """Whether it came beside the steps, as most do, or between them, as those that have more than pages."""
    rng = random.Random(0)
    layers = linears(device)
    writer, pool = PageWriter(layers, device), pools(layers)
    expected = {key: values.cpu().clone() for key, values in pool.items()}
    for _ in range(300):
        page_ids = rng.sample(range(NUM_PAGES), rng.randint(1, 3))
        rank = rng.randint(1, len(page_ids) * PAGE_RANK)
        keys = [key for key in pool if rng.random() < 0.4]
        matrices = {key: torch.randn(rank, pool[key].shape[1]) for key in keys}
        if rng.random() < 0.5:
            writer.write(adapter_of(matrices), page_ids)
        else:
            writer.write_matrices({key: matrix.to(device) for key, matrix in matrices.items()}, page_ids)
        ranks = [rank for start, end in page_runs(page_ids) for rank in range(start, end)]
        for key, values in expected.items():
            values[ranks] = 0
            values[ranks[:rank]] = matrices.get(key, torch.zeros(()))
    writer.wait(range(NUM_PAGES))
    for key, values in expected.items():
        assert torch.equal(pool[key].cpu(), values), key
    assert not any(values.isnan().any() for values in pool.values())
