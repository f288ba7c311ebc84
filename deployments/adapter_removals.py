"""Deletes the files of adapters that were unloaded, many at once, beside everything else. Lives on the driver's event loop."""

import asyncio
import logging
from collections.abc import Callable

from loray.deployments.adapter_finder import AdapterFinder
from loray.deployments.request import AdapterRef

logger = logging.getLogger("ray.serve.loray")

PATIENCE_S = 2.0  # that an admin waits for files to be deleted; what takes longer goes on


class AdapterRemovals:
    def __init__(self, finder: AdapterFinder) -> None:
        self._finder = finder
        self._running: set[asyncio.Task[None]] = set()
        self._new: set[asyncio.Task[None]] = set()  # that nobody has waited for

    @property
    def num_running(self) -> int:
        return len(self._running)

    def start(self, ref: AdapterRef, on_failure: Callable[[], None]) -> None:
        removal = asyncio.create_task(self._remove_or_tell(ref, on_failure))
        self._new.add(removal)
        self._running.add(removal)
        removal.add_done_callback(self._running.discard)

    async def wait_for_new(self) -> None:
        new, self._new = self._new, set()
        if new:
            await asyncio.wait(new, timeout=PATIENCE_S)

    async def remove(self, ref: AdapterRef, path: str = "") -> bool:
        """Whether it went well. What is on its way goes too, and is waited for here: a source that stalls takes no thread from others."""
        await self._finder.ended(ref)
        try:
            await self._finder.remove(ref, path)
        except Exception:
            logger.exception("adapter %s: its files can't be deleted", ref.adapter_id)
            return False
        return True

    async def _remove_or_tell(self, ref: AdapterRef, on_failure: Callable[[], None]) -> None:
        if not await self.remove(ref):
            on_failure()
