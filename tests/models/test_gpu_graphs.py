"""Which steps are replayed on a GPU, and as which graph: one without LoRA costs a batch of the base nothing."""

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from loray.models.step import Sampling
from tests.kernels.triton_marks import REAL_GPU
from tests.models.conductor import Conductor, Request, prompt_of

pytestmark = REAL_GPU
PAGES = [7, 3]
NUM_NEW = 5  # one from the prompt, the others from decodes


@dataclass
class Counted:
    """A graph that says how often it was replayed."""

    graph: torch.cuda.CUDAGraph
    key: tuple[int, bool]  # rows, and whether there is LoRA
    replays: Counter[tuple[int, bool]] = field(default_factory=Counter)

    def replay(self) -> None:
        self.replays[self.key] += 1
        self.graph.replay()


def counted(conductor: Conductor) -> Counter[tuple[int, bool]]:
    """The replays from now on."""
    graphs, replays = conductor.runner._graphs, Counter[tuple[int, bool]]()
    assert graphs is not None
    graphs._graphs = {key: Counted(graph, key, replays) for key, graph in graphs._graphs.items()}  # type: ignore[misc]
    return replays


@pytest.fixture(scope="module")
def conductor(base: Path, adapters: dict[int, Path]) -> Conductor:
    conductor = Conductor(base, device="cuda")
    conductor.load(adapters[12], PAGES)
    return conductor


@pytest.mark.parametrize("num_rows", [1, 3, 4, 5, 9, 16])
@pytest.mark.parametrize("lora", [False, True])
def test_small_steps_are_replayed_in_the_next_larger_size_with_lora_only_where_a_row_has_it(
    conductor: Conductor, num_rows: int, lora: bool
) -> None:
    replays = counted(conductor)
    page_ids = [PAGES if lora and row == num_rows - 1 else [] for row in range(num_rows)]
    conductor.play([Request(prompt_of(4, seed=row), pages, num_new=NUM_NEW) for row, pages in enumerate(page_ids)])
    sizes = [1, 2, 4, *range(8, 65, 8)]
    prompts, decodes = (next(size for size in sizes if size >= num_tokens) for num_tokens in (4 * num_rows, num_rows))
    assert replays == Counter({(prompts, lora): 1}) + Counter({(decodes, lora): NUM_NEW - 1})


def test_a_step_with_more_tokens_than_the_largest_graph_is_not_replayed_and_its_decodes_are(base: Path) -> None:
    conductor = Conductor(base, device="cuda", max_total_tokens=700)
    replays = counted(conductor)
    conductor.play([Request(prompt_of(513), num_new=NUM_NEW)])
    assert replays == {(1, False): NUM_NEW - 1}


def test_alternatives_of_replayed_steps_are_those_of_the_cpu(base: Path, adapters: dict[int, Path], conductor: Conductor) -> None:
    on_cpu = Conductor(base)
    on_cpu.load(adapters[12], PAGES)
    samplings = Sampling(num_alternatives=3), Sampling(), Sampling(temperature=0.8, top_k=9, seed=4, num_alternatives=1)
    requests = [Request(prompt_of(6, seed=i), PAGES if i else [], sampling) for i, sampling in enumerate(samplings)]
    replays = counted(conductor)
    for expected, found in zip(on_cpu.play(requests), conductor.play(requests), strict=True):
        assert found.token_ids == expected.token_ids
        for row, expected_row in zip(found.alternatives, expected.alternatives, strict=True):
            assert [token_id for token_id, _ in row] == [token_id for token_id, _ in expected_row]
            assert [logprob for _, logprob in row] == pytest.approx([logprob for _, logprob in expected_row], abs=1e-3)
    assert replays == {(24, True): 1, (4, True): 7}
