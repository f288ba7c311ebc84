"""What the tests let every rank do. Apart from them, so that a rank's process imports nothing that it does not need."""

from dataclasses import dataclass
from pathlib import Path

import torch

from loray.models.parallel import Parallel
from loray.models.shards import cut
from loray.models.step import AdapterLoad, Sampling
from tests.models.conductor import Conductor, Output, Request, prompt_of

PAGES = {1: [3], 12: [7, 1], 20: [4, 5, 6]}  # by the adapter's rank
Case = tuple[Path, dict[int, Path]]  # a base model, and its adapters by rank


@dataclass
class Answers:
    outputs: list[Output]
    failed_loads: dict[int, str]
    reduced: list[float]
    gathered: list[list[float]]


def do_everything(parallel: Parallel, cases: list[Case]) -> Answers:
    outputs = [output for case in cases for output in play(parallel, *case)]
    return Answers(outputs, load_unequally(parallel, *cases[0]), *collect(parallel))


def play(parallel: Parallel, base: Path, adapters: dict[int, Path]) -> list[Output]:
    """The base and adapters of several ranks together, greedy and seeded, prefills meeting decodes."""
    conductor = Conductor(base, parallel)
    for rank, adapter in adapters.items():
        conductor.load(adapter, PAGES[rank])
    requests = [
        Request(prompt_of(20 - i, seed=i), PAGES.get(rank, []), Sampling(temperature=0.7, seed=9) if i == 4 else Sampling())
        for i, rank in enumerate((0, 20, 1, 12, 20, 0))
    ]
    return conductor.play(requests, chunk=7, stagger=1)


def load_unequally(parallel: Parallel, base: Path, adapters: dict[int, Path]) -> dict[int, str]:
    """The last rank finds nothing where the others find an adapter."""
    is_last = parallel.rank == parallel.world_size - 1
    second = base / "absent" if is_last else adapters[1]
    return Conductor(base, parallel).step(loads=[AdapterLoad(str(adapters[1]), [0]), AdapterLoad(str(second), [1])])[2]


def collect(parallel: Parallel) -> tuple[list[float], list[list[float]]]:
    whole = torch.arange(21, dtype=torch.float32).view(3, 7)
    part = cut(7, parallel.rank, parallel.world_size)
    reduced = parallel.all_reduce(torch.full((2,), float(parallel.rank + 1)))
    return reduced.tolist(), parallel.gather_columns(whole[:, part.slice], 7).tolist()
