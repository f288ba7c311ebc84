"""Several async generators as one, in the order things happen. Knows nothing of what flows through."""

import asyncio
from collections.abc import AsyncGenerator
from typing import TypeVar

T = TypeVar("T")


async def merge(sources: list[AsyncGenerator[T, None]]) -> AsyncGenerator[T, None]:
    """The first error of any ends all. Closing it closes them all.

    No asyncio.TaskGroup: it may not be entered and left by different tasks, and a response's body is iterated by another
    task than the one that began it."""
    queue: asyncio.Queue[T | Exception | None] = asyncio.Queue()  # None: one source is through

    async def pump(source: AsyncGenerator[T, None]) -> None:
        try:
            async for item in source:
                queue.put_nowait(item)
            queue.put_nowait(None)
        except Exception as error:
            queue.put_nowait(error)
        finally:
            await source.aclose()

    tasks = [asyncio.create_task(pump(source)) for source in sources]
    num_open = len(tasks)
    try:
        while num_open:
            item = await queue.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                num_open -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
