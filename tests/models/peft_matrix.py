"""The parity matrix of PEFT's LoRA: every item on three architectures and on 1 and 2 ranks, against PEFT in float32.

`python -m tests.models.peft_matrix` runs it and writes its tables into docs/adapters.md.
"""

import re
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

import torch
import transformers

from loray.models.parallel import Parallel
from tests.models.families import FAMILIES, Oracle, Saved, config_of, random_model
from tests.models.matrix import TOLERANCE, Cell, compare, write_between
from tests.models.peft_items import NAMED, NAMES, REFUSALS, items_of, save_item, with_names
from tests.models.rank_jobs import NUM_ITEM_TOKENS, Played, play_items
from tests.models.rank_processes import RankGroup
from tests.models.rank_threads import ThreadGroup

WORLD_SIZES = (1, 2)
DOCUMENT = Path(__file__).parents[2] / "docs" / "adapters.md"
BEGIN, END = "<!-- peft: begin; written by python -m tests.models.peft_matrix -->", "<!-- peft: end -->"


class PeftMatrix:
    """Computes its cells when they are asked for; models, oracles and the tensor-parallel group are made once."""

    def __init__(self, folder: Path, group: type[RankGroup] | type[ThreadGroup]) -> None:
        self._folder = folder
        self._oracles: dict[str, Oracle] = {}
        self._played: dict[tuple[str, int], dict[str, list[Played]]] = {}
        self._named: dict[Path, Path] = {}  # by base model, what is served in the place of what the oracle reads
        self._group = group(2)

    def cell(self, family: str, world_size: int, item: str) -> Cell:
        oracle = self.oracle(family)
        if (family, world_size) not in self._played:
            self._played[family, world_size] = self._play(oracle.saved, world_size)
        return compare(self._played[family, world_size][item], oracle)

    def close(self) -> None:
        self._group.close()

    def oracle(self, family: str) -> Oracle:
        if family not in self._oracles:
            base = self._folder / family / "base"
            random_model(config_of(FAMILIES[family]), FAMILIES[family].norm_center, FAMILIES[family].seed).save_pretrained(base)
            adapters = {item: save_item(base, self._folder / family / item, settings) for item, settings in items_of(family).items()}
            self._named[base] = with_names(adapters[NAMED])
            self._oracles[family] = Oracle(Saved(base, adapters))
        return self._oracles[family]

    def _play(self, saved: Saved, world_size: int) -> dict[str, list[Played]]:
        """By item, of every rank."""
        adapters = {**saved.adapters, NAMED: self._named[saved.base]}
        is_alone = world_size == 1
        ranks = [play_items(Parallel(), saved.base, adapters)] if is_alone else self._group.run(play_items, saved.base, adapters)
        return {item: [played for rank in ranks for played in rank if played.adapter == item] for item in saved.adapters}


def report(matrix: PeftMatrix) -> str:
    columns = [(family, world_size) for family in NAMES for world_size in WORLD_SIZES]
    table = [["served", *(f"{family}<br>TP {world_size}" for family, world_size in columns)]]
    for item in {item: None for family in NAMES for item in items_of(family)}:
        cells = [str(matrix.cell(family, size, item)) if item in items_of(family) else "" for family, size in columns]
        table.append([item, *cells])
        print(" ".join(table[-1]), file=sys.stderr)
    refused = [["refused", "with this message, after the adapter's name"]]
    refused += [[name, f"`{refusal.message}`"] for name, refusal in REFUSALS.items()]
    versions = ", ".join(f"{package} {version(package)}" for package in ("torch", "transformers", "peft"))
    return "\n\n".join(
        [
            "The largest difference of any logit from PEFT in float32 on a CPU, on tiny random models whose sizes divide nothing evenly. "
            f"Each adapter runs alone and together with others and the base model, {NUM_ITEM_TOKENS} greedy tokens. A cell says FAILED "
            f"beyond {TOLERANCE:.0e}, or where a token is not PEFT's. With {versions}.",
            _markdown(table),
            _markdown(refused),
        ]
    )


def is_message(pattern: str, message: str) -> bool:
    """Whether the message ends as the pattern says, in which "…" stands for anything."""
    return re.search(".+".join(re.escape(part) for part in pattern.split("…")) + "$", message) is not None


def _markdown(rows: list[list[str]]) -> str:
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([lines[0], "|---" * len(rows[0]) + "|", *lines[1:]])


def main() -> None:
    torch.set_num_threads(1)
    transformers.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder:
        matrix = PeftMatrix(Path(folder), RankGroup)
        try:
            text = report(matrix)
        finally:
            matrix.close()
    write_between(DOCUMENT, BEGIN, END, text)
    sys.exit("| FAILED" in text)


if __name__ == "__main__":
    main()
