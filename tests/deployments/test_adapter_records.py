"""The set of what admins want, when changes fail and are undone."""

from typing import Any

import pytest

from loray.deployments import adapter_records
from loray.deployments.adapter_records import AdapterChange, AdapterSet
from loray.deployments.request import AdapterRef


def change(action: Any, revision: str = "", adapter_id: str = "x") -> AdapterChange:
    return AdapterChange(action=action, ref=AdapterRef(adapter_id=adapter_id, source="hub", revision=revision))


@pytest.mark.parametrize("has_good_one", [True, False])
@pytest.mark.parametrize("first_undone", [0, 1])
def test_two_changes_at_once_that_fail_leave_what_was_there_before_both(has_good_one: bool, first_undone: int) -> None:
    records = AdapterSet()
    if has_good_one:
        records.change(change("load", "good"))
    failing = [records.change(change("load", revision)) for revision in ("bad", "worse")]
    records.undo(failing[first_undone])
    records.undo(failing[1 - first_undone])
    assert [record.ref.revision for record in records.snapshot().records] == (["good"] if has_good_one else [])


def test_an_undo_leaves_a_later_change_that_went_well() -> None:
    records = AdapterSet()
    bad, good = records.change(change("load", "bad")), records.change(change("load", "good"))
    records.undo(bad)
    assert records.snapshot().records == [good.record]


def test_undone_changes_are_remembered_in_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter_records, "MAX_UNDONE", 3)
    records = AdapterSet()
    for number in range(10):
        records.undo(records.change(change("load", adapter_id=f"a{number}")))
    assert len(records._undone) == 3 and not records.snapshot().records


def test_only_load_and_reload_say_that_the_source_is_to_be_looked_at_again() -> None:
    records = AdapterSet()
    assert [records.change(change(action)).record.generation for action in ("pin", "unpin")] == [0, 0]
    reloaded = records.change(change("reload")).record
    assert reloaded.generation == reloaded.number == records.change(change("pin")).record.generation


@pytest.mark.parametrize("action", ["", "unload", "load"])
def test_unpinning_what_is_not_pinned_changes_no_record(action: str) -> None:
    records = AdapterSet()
    if action:
        records.change(change(action))
    before = records.snapshot()
    changed = records.change(change("unpin"))
    assert records.snapshot() == before and changed.record.number <= records.number and not changed.record.is_pinned


def test_a_load_is_overtaken_by_an_unload_and_by_nothing_else() -> None:
    records = AdapterSet()
    load = records.change(change("load")).record
    for action, is_overtaken in (("load", False), ("pin", False), ("reload", False), ("unload", True), ("load", False)):
        records.change(change(action))
        assert records.is_overtaken(load) is is_overtaken, action
