import time

import pytest

from loray.deployments import disk_room
from loray.deployments.disk_room import DiskBusy, DiskFull, DiskRoom

LONG_AGO_S = 30.0  # that a look may take


def began() -> float:
    return time.monotonic() - LONG_AGO_S


def test_what_a_look_has_not_found_is_not_looked_for_again_at_once() -> None:
    room = DiskRoom(100)
    room.check(100)
    room.looked(began(), num_held=50, num_coming=20)
    with pytest.raises(DiskBusy, match=r"no room for 31 bytes.*disk_bytes \(100\).*take 50 and downloads under way 20"):
        room.check(31)
    room.check(30)  # there may be


def test_a_look_counts_for_a_moment_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_room, "LOOK_SHARE", 0)
    room = DiskRoom(100)
    room.looked(began(), num_held=100, num_coming=0)
    room.check(1)


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
        room.check(1)
    room.changed()
    room.check(1)
    room.looked(before, num_held=100, num_coming=0)  # it had begun before that
    room.check(1)


def test_what_can_never_fit_is_told_so() -> None:
    room = DiskRoom(100)
    room.looked(began(), num_held=100, num_coming=0)
    with pytest.raises(DiskFull, match=r"101 bytes on disk, more than adapters.disk_bytes \(100\)"):
        room.check(101)
