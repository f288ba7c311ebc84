import asyncio
import threading

from loray.deployments.off_loop import in_turn_if, off_loop_if
from tests.deployments.scripted_backend import run


def test_slow_work_is_done_in_another_thread_and_quick_work_here() -> None:
    async def threads() -> list[threading.Thread]:
        return [await how(is_slow, threading.current_thread) for how in (off_loop_if, in_turn_if) for is_slow in (False, True)]

    here = [thread is threading.main_thread() for thread in run(threads())]
    assert here == [True, False, True, False]


def test_work_in_turn_is_never_done_twice_at_once() -> None:
    meeting = threading.Barrier(2)

    def meet() -> bool:
        try:
            meeting.wait(0.05)
        except threading.BrokenBarrierError:
            return False
        return True

    async def both() -> list[bool]:
        return await asyncio.gather(in_turn_if(True, meet), in_turn_if(True, meet))

    assert run(both()) == [False, False]
