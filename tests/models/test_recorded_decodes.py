"""Decodes that are recorded give what those that are computed give, whoever comes, goes, and has which adapter."""

from pathlib import Path

import pytest
import torch

from loray.kernels import native
from loray.models import recorded_decodes
from loray.models.step import Sampling
from tests.models.conductor import Conductor, Request, prompt_of
from tests.models.families import FAMILIES, save_family

pytestmark = pytest.mark.slow  # a model of every family

RECORDED = ("llama", "mistral", "qwen2", "phi3")
PAGES = {4: [9], 12: [7, 3], 64: [20, 21, 22, 10, 24, 25, 27, 26]}


@pytest.fixture
def conductor(base: Path, adapters: dict[int, Path]) -> Conductor:
    made = Conductor(base)
    for rank, pages in PAGES.items():
        made.load(adapters[rank], pages)
    return made


def requests() -> list[Request]:
    """Of different lengths, so that the number of rows changes, and with it the adapters among them."""
    ranks = (0, 64, 12, 4, 64, 0, 4)
    return [Request(prompt_of(3 + 7 * i, seed=i), PAGES.get(rank, []), Sampling(), num_new=4 + 3 * i) for i, rank in enumerate(ranks)]


def is_recorded(conductor: Conductor) -> bool:
    recorded = conductor.runner._recorded
    return recorded is not None and bool(recorded._kept)


def test_the_tokens_are_those_of_computed_steps(conductor: Conductor) -> None:
    found = conductor.play(requests(), stagger=1)
    assert is_recorded(conductor) == native.has_linear()
    conductor.runner._recorded = None
    expected = conductor.play(requests(), stagger=1)
    for one, other in zip(found, expected, strict=True):
        assert one.token_ids == other.token_ids
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-5)


def test_only_so_many_are_kept(conductor: Conductor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorded_decodes, "MAX_KEPT", 2)
    found = [output.token_ids for output in conductor.play(requests(), stagger=1)]
    assert conductor.runner._recorded is None or len(conductor.runner._recorded._kept) <= 2
    conductor.runner._recorded = None
    assert [output.token_ids for output in conductor.play(requests(), stagger=1)] == found


def test_adapters_of_an_earlier_step_are_not_those_of_a_later_one(conductor: Conductor) -> None:
    """Three rows with adapters, then three of which one has: the room for the others' is empty."""

    def play(*pages: list[int]) -> list[list[int]]:
        return [output.token_ids for output in conductor.play([Request(prompt_of(9, seed=i), page) for i, page in enumerate(pages)])]

    play(PAGES[4], PAGES[4], PAGES[4])
    mixed = [], PAGES[4], []
    found = play(*mixed)
    conductor.runner._recorded = None
    assert found == play(*mixed)


def test_the_first_prompt_may_be_one_token(base: Path) -> None:
    conductor = Conductor(base)
    conductor.play([Request(prompt_of(1))])
    assert is_recorded(conductor) == native.has_linear()


def test_a_cache_that_is_made_anew_is_the_one_that_counts(base: Path) -> None:
    conductor = Conductor(base)
    expected = conductor.generate(prompt_of(12))
    conductor.runner.allocate(40, 32)
    assert conductor.generate(prompt_of(12)) == expected


@pytest.mark.parametrize("name", FAMILIES)
def test_families_that_cannot_be_recorded_are_computed(tmp_path: Path, name: str) -> None:
    saved = save_family(FAMILIES[name], tmp_path)
    conductor = Conductor(saved.base, dtype=torch.float32)
    prompts = [Request(prompt_of(5 + i, seed=i), num_new=6) for i in range(3)]
    found = [output.token_ids for output in conductor.play(prompts)]
    assert is_recorded(conductor) == (native.has_linear() and name in RECORDED)
    conductor.runner._recorded = None
    assert [output.token_ids for output in conductor.play(prompts)] == found
