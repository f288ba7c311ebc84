import time

import pytest

from loray.deployments import disk_room
from loray.deployments.disk_room import DiskBusy, DiskFull, DiskRoom

LONG_AGO_S = 30.0  # that a look may take


def began() -> float:
    return time.monotonic() - LONG_AGO_S


def check(room: DiskRoom, num_bytes: int) -> None:
    """By who comes now."""
    room.check(num_bytes, asked=time.monotonic())


def test_what_a_look_has_not_found_is_not_looked_for_again_at_once() -> None:
    room = DiskRoom(100)
    check(room, 100)
    room.looked(began(), num_held=50, num_coming=20)
    with pytest.raises(DiskBusy, match=r"no room for 31 bytes.*disk_bytes \(100\).*take 50 and downloads under way 20"):
        check(room, 31)
    check(room, 30)  # there may be


def test_a_look_counts_for_a_moment_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_room, "LOOK_S", 0.0)
    monkeypatch.setattr(disk_room, "LOOK_SHARE", 0)
    room = DiskRoom(100)
    room.looked(began(), num_held=100, num_coming=0)
    check(room, 1)


def test_looks_that_take_long_are_far_apart() -> None:
    room = DiskRoom(100)
    room.looked(began(), num_held=100, num_coming=0)
    assert disk_room.LOOK_SHARE * LONG_AGO_S <= room.pause_s < disk_room.LOOK_SHARE * LONG_AGO_S + 10
    room.looked(time.monotonic(), num_held=100, num_coming=0)
    assert disk_room.LOOK_S <= room.pause_s < 10


def test_it_counts_no_more_when_there_may_be_room() -> None:
    room, before = DiskRoom(100), began()
    room.looked(before, num_held=100, num_coming=0)
    with pytest.raises(DiskBusy):
        check(room, 1)
    room.changed()
    check(room, 1)
    room.looked(before, num_held=100, num_coming=0)  # it had begun before that
    check(room, 1)


def test_it_counts_whatever_has_changed_for_who_waited_for_it_or_has_waited_since_an_earlier_one() -> None:
    room, before = DiskRoom(100), began()
    room.looked(before, num_held=100, num_coming=0)
    room.changed()
    with pytest.raises(DiskBusy):
        room.check(1, asked=before - 1)
    with pytest.raises(DiskBusy):
        room.check(1, asked=time.monotonic(), has_waited=True)
    check(room, 1)


def test_what_can_never_fit_is_told_so() -> None:
    room = DiskRoom(100)
    room.looked(began(), num_held=100, num_coming=0)
    with pytest.raises(DiskFull, match=r"101 bytes on disk, more than adapters.disk_bytes \(100\)"):
        check(room, 101)
