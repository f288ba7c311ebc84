"""What pages hold after any order of adapters: the last one's matrices, and zeros."""

import random
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from loray.kernels.lora import LoraPages
from loray.models.lora_groups import PAGE_RANK, page_runs
from loray.models.page_writer import PageWriter

NUM_PAGES, IN, WIDTHS = 6, 3, [2, 4]
NAMES = ("first", "second")


def linears() -> dict[str, Any]:
    """Two, each of two projections, with pages that hold what memory happens to hold."""

    def linear() -> Any:
        a = torch.full((len(WIDTHS), NUM_PAGES * PAGE_RANK, IN), torch.nan)
        b = torch.full((NUM_PAGES * PAGE_RANK, sum(WIDTHS)), torch.nan)
        return SimpleNamespace(lora=LoraPages(a, b, WIDTHS), widths=WIDTHS, paths=lambda path: [f"{path}.{name}" for name in NAMES])

    return {path: linear() for path in ("x", "y")}


def pools(layers: dict[str, Any]) -> dict[tuple[str, str], Tensor]:
    found = {}
    for path, layer in layers.items():
        for number, name in enumerate(layer.paths(path)):
            found[name, "a"] = layer.lora.a[number]
            found[name, "b"] = layer.lora.b.split(WIDTHS, 1)[number]
    return found


def test_pages_hold_the_last_adapter_and_zeros_whatever_was_there() -> None:
    rng = random.Random(0)
    layers = linears()
    writer, pool = PageWriter(layers, torch.device("cpu")), pools(layers)
    expected = {key: values.clone() for key, values in pool.items()}
    for _ in range(300):
        page_ids = rng.sample(range(NUM_PAGES), rng.randint(1, 3))
        rank = rng.randint(1, len(page_ids) * PAGE_RANK)
        keys = [key for key in pool if rng.random() < 0.4]
        matrices = {key: torch.randn(rank, pool[key].shape[1]) for key in keys}
        writer.write_matrices(matrices, page_ids)
        ranks = [rank for start, end in page_runs(page_ids) for rank in range(start, end)]
        for key, values in expected.items():
            values[ranks] = 0
            values[ranks[:rank]] = matrices.get(key, torch.zeros(()))
    for key, values in expected.items():
        assert torch.equal(pool[key].nan_to_num(7.0), values.nan_to_num(7.0)), key
    assert not any(values.isnan().any() for values in pool.values())
