"""Deletes the files of adapters that were unloaded, many at once, beside everything else. Lives on the driver's event loop."""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

from loray.deployments.adapter_finder import NUM_REMOVERS, AdapterFinder
from loray.deployments.adapter_wishes import AdapterWishes
from loray.deployments.request import AdapterRef

logger = logging.getLogger("ray.serve.loray")

PATIENCE_S = 2.0  # that an admin waits for files to be deleted; what takes longer goes on


@dataclass(slots=True)
class _Removal:
    ref: AdapterRef
    path: str
    place: str
    newest: int  # of the admins' wishes that led to it
    has_begun: bool = False


class AdapterRemovals:
    """place: where the download of a reference lies."""

    def __init__(self, finder: AdapterFinder, place: Callable[[AdapterRef], str], wishes: AdapterWishes) -> None:
        self._finder = finder
        self._place = place
        self._wishes = wishes
        self._turns = asyncio.Semaphore(NUM_REMOVERS)  # threads, so that who has his turn begins at once
        self._running: dict[asyncio.Task[bool], _Removal] = {}
        self._new: set[asyncio.Task[bool]] = set()  # since the last change
        self._failed: list[_Removal] = []

    def begin_change(self) -> None:
        """What could not be deleted is tried once more."""
        self._new.clear()
        failed, self._failed = self._failed, []
        for removal in failed:
            self._start(removal)

    def start(self, ref: AdapterRef, path: str = "") -> "asyncio.Task[bool]":
        """Returns whether it was deleted: what an admin wants again when its turn has come stays."""
        return self._start(_Removal(ref, path, self._place(ref), self._wishes.newest))

    def _start(self, removal: _Removal) -> "asyncio.Task[bool]":
        task = asyncio.create_task(self._remove(removal))
        self._new.add(task)
        self._running[task] = removal
        task.add_done_callback(self._running.pop)
        return task

    async def end_change(self) -> None:
        if self._new:
            await asyncio.wait(self._new, timeout=PATIENCE_S)

    async def give_way(self, ref: AdapterRef) -> None:
        """To who loads it again: he finds either what was there, or nothing, and never what is about to go."""
        place = self._place(ref)
        if tasks := [task for task, removal in self._running.items() if removal.place == place]:
            for task in tasks:
                if not self._running[task].has_begun:
                    task.cancel()
            await asyncio.wait(tasks)

    async def _remove(self, removal: _Removal) -> bool:
        await self._finder.ended(removal.ref)  # what is on its way goes too; a source that stalls takes nobody's turn
        async with self._turns:
            if self._wishes.is_place_wanted_since(removal.ref, removal.newest):
                return False
            removal.has_begun = True
            try:
                await self._finder.remove(removal.ref, removal.path)
            except Exception:
                logger.exception("adapter %s: its files can't be deleted; the next change tries again", removal.ref.adapter_id)
                self._failed.append(removal)
                return False
        return True
