"""Work in children that are forked for it; the children are real."""

import os
import signal
import time

import pytest

from loray.deployments.forked_work import ChildLost, ChildTooSlow, in_child


def test_an_answer_of_any_size_comes_back_whole() -> None:
    held = os.urandom(3 << 20)
    assert in_child(lambda: held + str(os.getppid()).encode(), 30) == held + str(os.getpid()).encode()


@pytest.mark.slow
def test_a_child_that_does_not_survive_its_work_is_lost_and_the_next_is_not() -> None:
    with pytest.raises(ChildLost):
        in_child(lambda: b"x" * os.kill(os.getpid(), signal.SIGSEGV), 30)  # type: ignore[operator]
    assert in_child(lambda: b"next", 30) == b"next"


def test_a_child_that_takes_too_long_is_killed() -> None:
    reader, writer = os.pipe()

    def endless() -> bytes:
        while True:
            time.sleep(60)

    with pytest.raises(ChildTooSlow):
        in_child(endless, 0.1)
    os.close(writer)
    assert os.read(reader, 1) == b"", "no process holds the other end any more"
    os.close(reader)
