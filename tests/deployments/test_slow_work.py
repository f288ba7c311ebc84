import asyncio

import pytest

from loray.deployments.slow_work import told_when_slow


def test_work_ends_with_the_one_who_waits_for_it() -> None:
    async def main() -> None:
        begun, ended = asyncio.Event(), asyncio.Event()

        async def work() -> None:
            try:
                begun.set()
                await asyncio.Event().wait()
            finally:
                ended.set()

        waiting = asyncio.create_task(told_when_slow(work(), 60, lambda: None))
        await begun.wait()
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        async with asyncio.timeout(10):
            await ended.wait()

    asyncio.run(main())
