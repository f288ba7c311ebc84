"""Tells whoever waits for some work that it is slow. Knows nothing of the work."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


async def told_when_slow(work: Coroutine[Any, Any, T], slow_s: float, on_slow: Callable[[], None]) -> T:
    """The work's answer. It ends when nobody waits for it any more."""
    task = asyncio.ensure_future(work)
    try:
        if not (await asyncio.wait({task}, timeout=slow_s))[0]:
            on_slow()
        return await task
    finally:
        task.cancel()
