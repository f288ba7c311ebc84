"""Which decodes are recorded, and which recordings are kept. Without a model and native.c: what would be recorded is called again."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from loray.kernels import native
from loray.kernels.native_tape import Recorded
from loray.models import recorded_decodes
from loray.models.batch import Batch, PagedWork
from loray.models.recorded_decodes import MAX_ROWS, RecordedDecodes
from loray.models.special import Special, SpecialRows


class Tapes:
    """Stands in for native.recorded."""

    def __init__(self) -> None:
        self.num_rows: list[int] = []  # of each that was made
        self.are_whole = True  # else torch has a part in what is computed

    def recorded(self, calls: Callable[[], Tensor]) -> tuple[Tensor, Recorded | None]:
        output = calls()
        self.num_rows.append(len(output))
        kept = output.clone()

        def replay(first: int, count: int) -> None:
            kept.copy_(calls())

        return output, Recorded(kept, torch.zeros(0, dtype=torch.int64), replay) if self.are_whole else None


@pytest.fixture
def tapes(monkeypatch: pytest.MonkeyPatch) -> Tapes:
    made = Tapes()
    monkeypatch.setattr(native, "recorded", made.recorded)
    return made


@pytest.fixture
def decodes() -> RecordedDecodes:
    return RecordedDecodes(hidden, max_blocks=4)


def hidden(batch: Batch) -> Tensor:
    return 2.0 * batch.input_ids[:, None]


def batch_of(num_rows: int, first_id: int = 0, num_decodes: int | None = None, specials: tuple[SpecialRows, ...] = ()) -> Batch:
    places = torch.arange(num_rows)
    table = torch.zeros(num_rows, 2, dtype=torch.int32)
    work = PagedWork(num_rows if num_decodes is None else num_decodes, table, torch.ones(num_rows, dtype=torch.int32), prompts=None)
    return Batch(first_id + places.int(), places, places, work, lora_work=(), specials=specials, sample_tokens=None)


def play(decodes: RecordedDecodes, *batches: Batch) -> None:
    for batch in batches:
        assert decodes.hidden(batch).equal(hidden(batch))


def test_what_was_recorded_is_replayed_with_the_tokens_of_later_steps(tapes: Tapes, decodes: RecordedDecodes) -> None:
    play(decodes, batch_of(3), batch_of(3, first_id=5), batch_of(2, first_id=7), batch_of(3, first_id=9))
    assert tapes.num_rows == [3, 2]


def test_the_least_recently_used_is_given_up_and_recorded_anew(
    tapes: Tapes, decodes: RecordedDecodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorded_decodes, "MAX_KEPT", 2)
    play(decodes, batch_of(1), batch_of(2), batch_of(1), batch_of(3), batch_of(1))
    assert tapes.num_rows == [1, 2, 3], "the first was used meanwhile"
    play(decodes, batch_of(2))
    assert tapes.num_rows == [1, 2, 3, 2]


def test_many_rows_are_computed(tapes: Tapes, decodes: RecordedDecodes) -> None:
    play(decodes, batch_of(MAX_ROWS), batch_of(MAX_ROWS + 1))
    assert tapes.num_rows == [MAX_ROWS]


def test_prompts_and_adapters_with_more_than_pages_are_computed(tapes: Tapes, decodes: RecordedDecodes) -> None:
    play(decodes, batch_of(3, num_decodes=2), batch_of(3, specials=(SpecialRows(slice(0, 1), slice(0, 1), Special(frozenset(), {})),)))
    assert tapes.num_rows == []


def test_a_model_that_needs_torch_is_tried_once(tapes: Tapes, decodes: RecordedDecodes) -> None:
    tapes.are_whole = False
    play(decodes, batch_of(1), batch_of(1), batch_of(2))
    assert tapes.num_rows == [1]
