"""What the tests let every rank do. Apart from them, so that a rank's process imports nothing that it does not need."""

from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from loray.models.batch import Batch
from loray.models.layout import Layout
from loray.models.parallel import Parallel
from loray.models.shards import cut
from loray.models.step import AdapterLoad, Admission, Row, Sampling
from tests.models.conductor import Conductor, Output, Request, prompt_of

Floats = NDArray[np.float32]
NUM_NEW, FEW_NEW, NUM_ITEM_TOKENS = 32, 2, 16
CHUNK = 7
MODES = {  # adapters of the requests that run together; "" = the base model
    "base": ("", "", ""),
    "LoRA r 8": ("r8", "", "r8"),
    "mixed ranks": ("", "r4", "r16", "r8", "r4", ""),
    "rsLoRA": ("rs8", "r8", "rs8"),
}
MATRIX_PAGES = {"r4": [3], "r8": [6], "r16": [9, 1], "rs8": [4]}  # rank pages by adapter
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


def sum_or_fail(parallel: Parallel, value: float) -> float:
    """The last rank takes no negative value, and the others wait for it."""
    if value < 0 and parallel.rank == parallel.world_size - 1:
        raise ValueError("this rank cannot")
    return parallel.all_reduce(torch.tensor(value)).item()


@dataclass
class Played:
    """One request of the matrix, as a rank computed it."""

    adapter: str
    prompt: list[int]
    token_ids: list[int]
    logits: Floats  # [len(token_ids), vocab_size], from which each of the tokens was taken


class Recorder(Conductor):
    """Keeps the logits behind every token."""

    def __init__(self, folder: Path, parallel: Parallel | None = None, **settings: Any) -> None:
        super().__init__(folder, parallel, **settings)
        self.pages = MATRIX_PAGES  # by adapter
        self.logits: defaultdict[int, list[Floats]] = defaultdict(list)  # by slot
        self._rows: Floats
        self._order: list[int]
        model, planner = self.runner._model, self.runner._planner
        model_logits, batch_of = model.logits, planner.batch

        def recorded_logits(hidden: Tensor, batch: Batch) -> Tensor:
            logits = model_logits(hidden, batch)
            self._rows = logits.float().numpy().copy()
            return logits

        def recorded_batch(layout: Layout) -> Batch:
            self._order = layout.result_order
            return batch_of(layout)

        model.logits, planner.batch = recorded_logits, recorded_batch  # type: ignore[method-assign]

    def step(
        self, rows: list[Row] | None = None, admissions: list[Admission] | None = None, loads: list[AdapterLoad] | None = None
    ) -> tuple[list[int], list[float], dict[int, str]]:
        result = super().step(rows, admissions, loads)
        slots = [row.slot for row in rows or [] if row.samples]
        if slots:
            for slot, logits in zip(slots, self._rows[self._order], strict=True):
                self.logits[slot].append(logits)
        return result

    def record(self, adapters: tuple[str, ...], num_new: int = NUM_NEW, chunk: int = 10_000, stagger: int = 0) -> list[Played]:
        self.logits.clear()
        requests = [
            Request(prompt_of(20 - 3 * i, seed=i), self.pages.get(adapter, []), num_new=num_new) for i, adapter in enumerate(adapters)
        ]
        outputs = self.play(requests, chunk, stagger)
        return [
            Played(adapter, request.prompt, output.token_ids, np.stack(self.logits[slot]))
            for slot, (adapter, request, output) in enumerate(zip(adapters, requests, outputs, strict=True))
        ]


def play_modes(parallel: Parallel, base: Path, adapters: dict[str, Path]) -> dict[str, list[Played]]:
    """Every mode alone and together, whole and in chunks; together some start late, so that prefills meet decodes."""
    recorder = Recorder(base, parallel)
    for name, folder in adapters.items():
        recorder.load(folder, MATRIX_PAGES[name])
    played = {}
    for mode, together in MODES.items():
        first = next((adapter for adapter in together if adapter), "")
        played[mode] = [
            *recorder.record((first,)),
            *recorder.record((first,), num_new=FEW_NEW, chunk=CHUNK),
            *recorder.record(together, num_new=FEW_NEW),
            *recorder.record(together, chunk=CHUNK, stagger=1),
        ]
    return played


def play_items(parallel: Parallel, base: Path, adapters: dict[str, Path]) -> list[Played]:
    """Every adapter alone, briefly where ranks make it slow; and five at a time together with the base model, in chunks, some late, so
    that prefills meet decodes."""
    recorder = Recorder(base, parallel, num_pages=160)
    recorder.pages = {}
    page = 0
    for index, (item, folder) in enumerate(adapters.items()):
        num_pages = 32 if "256" in item else 3  # more than most need, and not one after another
        pages = list(range(page, page + num_pages))
        recorder.pages[item] = pages[::-1] if index % 2 else pages
        page += num_pages + index % 2
        recorder.load(folder, recorder.pages[item])
    items = list(adapters)
    num_alone = NUM_ITEM_TOKENS if parallel.world_size == 1 else FEW_NEW
    played = [recorder.record((item,), num_new=num_alone)[0] for item in items]
    for first in range(0, len(items), 5):
        played += recorder.record(("", *items[first : first + 5]), num_new=NUM_ITEM_TOKENS, chunk=CHUNK, stagger=1)
    return played
