"""The parity matrix: every native architecture on 1, 2 and 3 ranks, base and LoRA, against transformers and PEFT in float32.

`python -m tests.models.matrix` runs it and writes its table into docs/models.md.
"""

import re
import sys
import tempfile
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch
import transformers

from loray.models.adapter import EMBEDDINGS, HEAD
from loray.models.lora import LoraPool
from loray.models.parallel import Parallel
from loray.models.registry import ARCHITECTURES
from tests.models.families import FAMILIES, Oracle, Saved, config_of, save_family
from tests.models.rank_jobs import CHUNK, FEW_NEW, MODES, NUM_NEW, Played, play_modes
from tests.models.rank_processes import RankGroup
from tests.models.rank_threads import ThreadGroup

WORLD_SIZES = (1, 2, 3)
TOLERANCE = 1e-4
DOCUMENT = Path(__file__).parents[2] / "docs" / "models.md"
BEGIN, END = "<!-- matrix: begin; written by python -m tests.models.matrix -->", "<!-- matrix: end -->"


@dataclass(frozen=True, slots=True)
class Cell:
    difference: float  # the largest of any logit, over every request and rank
    problem: str = ""  # why it failed; empty = it did not

    def __str__(self) -> str:
        return "FAILED" if self.problem else f"{self.difference:.0e}"


class Matrix:
    """Computes its cells when they are asked for; models, oracles and tensor-parallel groups are made once."""

    def __init__(self, folder: Path, group: type[RankGroup] | type[ThreadGroup]) -> None:
        self._folder = folder
        self._oracles: dict[str, Oracle] = {}
        self._cells: dict[tuple[str, int], dict[str, Cell]] = {}
        self._groups = {world_size: group(world_size) for world_size in WORLD_SIZES if world_size > 1}

    def cell(self, family: str, world_size: int, mode: str) -> Cell:
        if (family, world_size) not in self._cells:
            self._cells[family, world_size] = self._compute(family, world_size)
        return self._cells[family, world_size][mode]

    def close(self) -> None:
        for group in self._groups.values():
            group.close()

    def oracle(self, family: str) -> Oracle:
        if family not in self._oracles:
            self._oracles[family] = Oracle(save_family(FAMILIES[family], self._folder / family))
        return self._oracles[family]

    def _compute(self, family: str, world_size: int) -> dict[str, Cell]:
        oracle = self.oracle(family)
        try:
            ranks = self._play(oracle.saved, world_size)
        except Exception as error:  # whatever it is, it is this cell's and no other's
            return dict.fromkeys(MODES, Cell(float("inf"), f"{type(error).__name__}: {error}"))
        return {mode: compare([played for rank in ranks for played in rank[mode]], oracle) for mode in MODES}

    def _play(self, saved: Saved, world_size: int) -> list[dict[str, list[Played]]]:
        if world_size == 1:
            return [play_modes(Parallel(), saved.base, saved.adapters)]
        return self._groups[world_size].run(play_modes, saved.base, saved.adapters)


def compare(played: list[Played], oracle: Oracle) -> Cell:
    """Every token must be the oracle's best after the tokens before it: so all of them are those it generates itself."""
    largest, problem = 0.0, ""
    for request in played:
        tokens = request.prompt + request.token_ids
        expected = oracle.logits(request.adapter, tokens)[len(request.prompt) - 1 : -1].numpy()  # [num_new, vocab_size]
        difference = float(np.abs(expected - request.logits).max())
        largest = max(largest, difference)
        name = f"adapter {request.adapter or 'none'}, prompt of {len(request.prompt)}"
        if not difference <= TOLERANCE:  # nan is no parity either
            problem = problem or f"{name}: logits differ by {difference}"
        if (wanted := expected.argmax(1).tolist()) != request.token_ids:
            problem = problem or f"{name}: tokens {request.token_ids}, the oracle's are {wanted}"
    return Cell(largest, problem)


def lora_targets(family: str) -> list[str]:
    """Linears that can carry LoRA, as they are called inside a layer."""
    with torch.device("meta"):
        model = ARCHITECTURES[FAMILIES[family].architecture](config_of(FAMILIES[family]), Parallel(), 64)
    linears = (path for path in LoraPool(model).shapes if not is_vocabulary(path))
    return list(dict.fromkeys(re.split(r"\.\d+\.", path)[-1].removeprefix("model.decoder.") for path in linears))


def is_vocabulary(path: str) -> bool:
    """An embedding or a head, on which "all-linear" puts no LoRA."""
    return path.rpartition(".")[2] in (*EMBEDDINGS, HEAD)


def report(matrix: Matrix) -> str:
    columns = [(world_size, mode) for world_size in WORLD_SIZES for mode in MODES]
    table = [["architecture", *(f"TP {world_size}<br>{mode}" for world_size, mode in columns)]]
    targets = [["architecture", "models", "LoRA on"]]
    for name, family in FAMILIES.items():
        table.append([f"{family.architecture}<br>{name}", *(str(matrix.cell(name, *column)) for column in columns)])
        targets.append([f"{family.architecture}<br>{name}", family.known_as, ", ".join(lora_targets(name))])
        print(" ".join(table[-1]).replace("<br>", " "), file=sys.stderr)
    versions = ", ".join(f"{package} {version(package)}" for package in ("torch", "transformers", "peft"))
    return "\n\n".join(
        [
            "Each row is a tiny random model whose sizes divide nothing evenly. What each takes LoRA on:",
            _markdown(targets),
            "The largest difference of any logit from transformers and PEFT in float32 on a CPU. Requests run alone and together, their "
            f"prompts in one piece and in chunks of {CHUNK}: {NUM_NEW} greedy tokens alone in one piece and together in chunks, "
            f"{FEW_NEW} the other two ways. A cell says FAILED beyond {TOLERANCE:.0e}, or where a token is not theirs. With {versions}.",
            _markdown(table),
        ]
    )


def _markdown(rows: list[list[str]]) -> str:
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([lines[0], "|---" * len(rows[0]) + "|", *lines[1:]])


def write_between(document: Path, begin: str, end: str, text: str) -> None:
    """Put the text between the two marks of the document."""
    before, rest = document.read_text(encoding="utf-8").split(begin)
    document.write_text(f"{before}{begin}\n{text}\n{end}{rest.split(end)[1]}", encoding="utf-8")


def main() -> None:
    torch.set_num_threads(1)
    transformers.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder:
        matrix = Matrix(Path(folder), RankGroup)
        try:
            text = report(matrix)
        finally:
            matrix.close()
    write_between(DOCUMENT, BEGIN, END, text)
    sys.exit("| FAILED" in text)


if __name__ == "__main__":
    main()
