"""Work that would hold up the event loop, done in threads. Knows nothing of what it is."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")

_ONE_THREAD = ThreadPoolExecutor(1, "in-turn")


async def off_loop_if(is_slow: bool, work: Callable[[], T]) -> T:
    """For what lets go of the GIL, or is rare."""
    return await asyncio.to_thread(work) if is_slow else work()


async def in_turn_if(is_slow: bool, work: Callable[[], T]) -> T:
    """For what Python does itself: more threads would do no more of it, and each keeps the GIL from the event loop for 5 ms at a time."""
    return await asyncio.get_running_loop().run_in_executor(_ONE_THREAD, work) if is_slow else work()
