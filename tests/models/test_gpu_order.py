"""Adapters are copied into pages beside the steps, and no step finds in a page what is not its own: who did not wait would be first."""

from pathlib import Path

import pytest
import torch

from loray.models.launched import Launched
from loray.models.step import AdapterLoad, Admission, Row, Sampling, Step
from tests.kernels.triton_marks import REAL_GPU
from tests.models.conductor import Conductor, prompt_of

pytestmark = REAL_GPU
PAGES = [7, 3]
PROMPT = prompt_of(9)


class Delayed:
    """One sequence after another, each for one token, on a GPU whose streams are kept busy for a while."""

    def __init__(self, folder: Path) -> None:
        self.conductor = Conductor(folder, device="cuda")
        self._number = 0

    def launch_load(self, folder: Path, page_ids: list[int] = PAGES) -> Launched:
        return self._launch(loads=[AdapterLoad(str(folder), page_ids)])

    def launch_prompt(self, slot: int, page_ids: list[int] = PAGES) -> Launched:
        row = Row(slot, len(PROMPT), self.conductor.blocks(slot, 0, len(PROMPT)), True)
        return self._launch([Admission(slot, PROMPT, [], 0, page_ids, Sampling())], [row])

    @property
    def copies(self) -> torch.cuda.Stream:
        """The stream of adapters on their way."""
        stream = self.conductor.runner._lora._writer._stream
        assert stream is not None
        return stream

    def logprob_of(self, folder: Path) -> float:
        """With nothing beside it."""
        self.launch_load(folder).result()
        torch.cuda.synchronize()
        (logprob,) = self.launch_prompt(0).result().logprobs
        return logprob

    def _launch(
        self, admissions: list[Admission] | None = None, rows: list[Row] | None = None, loads: list[AdapterLoad] | None = None
    ) -> Launched:
        self._number += 1
        return self.conductor.runner.launch(Step(self._number, loads or [], admissions or [], rows or []))


def keep_busy(stream: torch.cuda.Stream) -> None:
    with torch.cuda.stream(stream):
        torch.cuda._sleep(300_000_000)  # clock cycles: more than a tenth of a second


@pytest.fixture
def delayed(base: Path) -> Delayed:
    return Delayed(base)


def test_a_step_that_is_late_still_finds_its_adapter_where_another_takes_the_pages(delayed: Delayed, adapters: dict[int, Path]) -> None:
    first, second = delayed.logprob_of(adapters[12]), delayed.logprob_of(adapters[4])
    assert abs(first - second) > 1e-3
    delayed.launch_load(adapters[12]).result()
    torch.cuda.synchronize()
    keep_busy(torch.cuda.current_stream())
    late, load = delayed.launch_prompt(0), delayed.launch_load(adapters[4])
    assert late.result().logprobs == pytest.approx([first], abs=1e-5)
    load.result()
    assert delayed.launch_prompt(1).result().logprobs == pytest.approx([second], abs=1e-5)


def test_a_step_waits_for_an_adapter_that_is_late(delayed: Delayed, adapters: dict[int, Path]) -> None:
    expected = delayed.logprob_of(adapters[4])
    assert abs(delayed.logprob_of(adapters[12]) - expected) > 1e-3
    keep_busy(delayed.copies)
    delayed.launch_load(adapters[4])
    assert delayed.launch_prompt(1).result().logprobs == pytest.approx([expected], abs=1e-5)


def test_a_step_of_others_does_not_wait_for_an_adapter_that_is_late(delayed: Delayed, adapters: dict[int, Path]) -> None:
    expected = delayed.launch_prompt(0, []).result().logprobs
    keep_busy(delayed.copies)
    load = delayed.launch_load(adapters[4])
    assert delayed.launch_prompt(1, []).result().logprobs == expected
    assert not load.is_done
    load.result()


def test_a_step_waits_for_each_of_two_adapters_that_are_late(delayed: Delayed, adapters: dict[int, Path]) -> None:
    expected = {rank: delayed.logprob_of(adapters[rank]) for rank in (4, 12)}
    delayed.launch_load(adapters[64], list(range(16, 24))).result()
    assert len({round(delayed.launch_prompt(0, pages).result().logprobs[0], 3) for pages in (PAGES, [16, 17])}) == 2
    keep_busy(delayed.copies)
    delayed.launch_load(adapters[4], PAGES)
    delayed.launch_load(adapters[12], [16, 17])
    first, second = delayed.launch_prompt(1, PAGES), delayed.launch_prompt(2, [16, 17])
    assert first.result().logprobs == pytest.approx([expected[4]], abs=1e-5)
    assert second.result().logprobs == pytest.approx([expected[12]], abs=1e-5)
