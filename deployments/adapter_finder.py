"""Finds adapters for requests: in threads, so that a slow download holds up nobody else, and each once, however many wait for it.

Lives on the driver's event loop. Knows neither tiers nor Ray.
"""

import asyncio
import hashlib
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, asynccontextmanager, contextmanager
from typing import Protocol, TypeVar

import msgspec

from loray.deployments.adapter_accounts import account_of, account_of_merge
from loray.deployments.adapter_status import TierUse
from loray.deployments.adapters import Adapter
from loray.deployments.counting import counted
from loray.deployments.errors import Overloaded
from loray.deployments.request import MERGE_OF, AdapterRef

T = TypeVar("T")

NUM_FINDERS = 256  # downloads at once; most of the time few
NUM_READERS = 64  # for folders on this node, whose files are read when they are new
NUM_MERGES = 2  # at once, of different names; each is a process that reads all of its adapters
NUM_REMOVERS = 64  # a removal waits for the download of the same adapter, also by another process
NUM_LOOKERS = 8  # for questions that are answered at once
NUM_AT_A_PLACE = 8  # threads that one adapter may take: callers with tokens of their own, and all of a folder, ask each for themselves
REST_S = 0.5  # between two looks at folders that are to be listed, so that the driver's own work goes on


TurnKey = tuple[str, bool]  # a place, and whether it is on this node
Needed = Callable[[Adapter], AbstractContextManager[object]]  # as long as it is entered, the adapter's files stay on disk


class Store(Protocol):
    """Where adapters come from. Blocking; any thread may call this."""

    max_pinned_bytes: int  # on disk

    def find(self, ref: AdapterRef, asked: float | None = None) -> Adapter: ...
    def held_merge(self, ref: AdapterRef, parts: list[Adapter]) -> Adapter | None: ...
    def check_merge(self, ref: AdapterRef, parts: list[Adapter]) -> None: ...
    def merged(self, ref: AdapterRef, parts: list[Adapter]) -> Adapter: ...
    def is_local(self, ref: AdapterRef) -> bool: ...
    def named(self, ref: AdapterRef) -> AdapterRef: ...
    def place_key(self, ref: AdapterRef, path: str = "") -> str: ...
    def forget(self, ref: AdapterRef) -> None: ...
    def remove(self, ref: AdapterRef, path: str = "") -> None: ...
    def hold(self, path: str) -> None: ...
    def let_go(self, path: str) -> bool: ...
    def free(self, path: str) -> None: ...
    def is_on_disk(self, ref: AdapterRef) -> bool: ...
    def disk_bytes(self, ref: AdapterRef, path: str = "") -> int: ...
    def folder_bytes(self, path: str) -> int: ...
    def disk_use(self, ref: AdapterRef, path: str = "") -> TierUse: ...
    def total_disk_use(self) -> TierUse: ...
    def is_private(self, ref: AdapterRef) -> bool: ...
    def is_proven(self, ref: AdapterRef) -> bool: ...
    def is_stale(self, ref: AdapterRef) -> bool: ...
    def names(self) -> list[str]: ...
    def num_unlisted(self) -> int: ...
    def left_on_disk(self, known: Set[str]) -> list[tuple[AdapterRef, Adapter]]: ...


class AdapterFinder:
    def __init__(self, store: Store, max_waiting: int, needed: Needed) -> None:
        self._store = store
        self._max_waiting = max_waiting  # for one adapter
        self._needed = needed
        self._finders = ThreadPoolExecutor(NUM_FINDERS, "adapter-finder")
        self._readers = ThreadPoolExecutor(NUM_READERS, "adapter-reader")
        self._mergers = ThreadPoolExecutor(NUM_MERGES, "adapter-merger")
        self._removers = ThreadPoolExecutor(NUM_REMOVERS, "adapter-remover")
        self._lookers = ThreadPoolExecutor(NUM_LOOKERS, "adapter-looker")
        self._searches: dict[AdapterRef, asyncio.Task[Adapter]] = {}  # of those that may take long
        self._num_waiting: Counter[tuple[str, bool]] = Counter()  # requests, by id or merged place, and if tokens are proven
        self._num_asking: Counter[asyncio.Task[Adapter]] = Counter()  # requests, by search
        self._turns: dict[TurnKey, asyncio.Semaphore] = {}
        self._num_at: Counter[TurnKey] = Counter()  # that have or want a turn
        self._unbegun: set[asyncio.Task[Adapter] | None] = set()  # searches that wait for theirs
        self._merges = asyncio.Semaphore(NUM_MERGES)
        self._merging: set[asyncio.Task[Adapter] | None] = set()  # searches whose merge is being made
        self._names: asyncio.Future[list[str]] | None = None  # a listing under way
        self._listing: asyncio.Task[None] | None = None

    async def find(self, ref: AdapterRef) -> Adapter:
        """The adapter as it is to be served now; its version tells apart equal files of different places. Raises a LorayError."""
        like = (self._place(ref) if ref.merge else ref.adapter_id), self._store.is_proven(ref)
        if self._num_waiting[like] >= self._max_waiting:
            raise Overloaded(f"{self._num_waiting[like]} requests wait for adapter {ref.adapter_id!r} to be found; try again")
        search = self._searches.get(ref) or self._start(ref)
        with counted(self._num_waiting, like), counted(self._num_asking, search):
            try:
                return await asyncio.shield(search)
            finally:
                is_made = not ref.merge or search in self._merging  # it goes on, for those who come again
                if self._num_asking[search] == 1 and (search in self._unbegun or not is_made):
                    self._give_up(ref, search)  # nobody else asks

    async def forget(self, ref: AdapterRef) -> None:
        """Who asks from now on gets what the source has now."""
        for running in list(self._searches):
            if any(self._is_same(one, ref) for one in (running, *self._parts(running))):
                del self._searches[running]
        await self.look(lambda: self._store.forget(ref))

    def is_searching(self, ref: AdapterRef) -> bool:
        """Whether its source may be asked right now."""
        return bool(self._searches_of(ref))

    def searching(self) -> list[AdapterRef]:
        """What is being downloaded, merged or looked for at its source right now."""
        return list(self._searches)

    async def ended(self, ref: AdapterRef) -> None:
        """Returns when those searches for it are over that run now."""
        if searches := self._searches_of(ref):
            await asyncio.wait(searches)

    def _searches_of(self, ref: AdapterRef) -> "list[asyncio.Task[Adapter]]":
        return [search for running, search in self._searches.items() if self._is_same(running, ref)]

    def _is_same(self, running: AdapterRef, ref: AdapterRef) -> bool:
        """Also where it writes its place in another way. A merge has no place but its name."""
        return running.adapter_id == ref.adapter_id or (not running.merge and self._store.place_key(running) == self._store.place_key(ref))

    async def remove(self, ref: AdapterRef, path: str = "") -> None:
        """Delete what of it is on disk and may go."""
        await asyncio.get_running_loop().run_in_executor(self._removers, lambda: self._store.remove(ref, path))

    async def free(self, path: str) -> None:
        """Delete a folder that was removed while it was needed."""
        await asyncio.get_running_loop().run_in_executor(self._removers, lambda: self._store.free(path))

    async def left_on_disk(self, known: Set[str]) -> list[tuple[AdapterRef, Adapter]]:
        """Downloads and merges of an earlier process, of other keys than these, in the versions that `find` would give them."""
        return [(ref, _of_its_place(adapter)) for ref, adapter in await self.look(lambda: self._store.left_on_disk(known))]

    async def names(self) -> list[str]:
        """Of very many new folders the first; the others are looked at in the background, and are in a later answer."""
        if self._names is None or self._names.done():  # one at a time: each may take all the seconds that it is given
            self._names = self.look(self._store.names)
        names = await asyncio.shield(self._names)
        if self._store.num_unlisted() and (self._listing is None or self._listing.done()):
            self._listing = asyncio.create_task(self._look_at_new())
        return names

    async def _look_at_new(self) -> None:
        while self._store.num_unlisted():
            await asyncio.sleep(REST_S)
            await self.look(self._store.names)

    def look(self, work: Callable[[], T]) -> "asyncio.Future[T]":
        """For questions that need no source."""
        return asyncio.get_running_loop().run_in_executor(self._lookers, work)

    def _start(self, ref: AdapterRef) -> "asyncio.Task[Adapter]":
        is_joined = ref.merge is not None or not self._store.is_local(ref)  # a folder is looked at anew each time: it may have changed
        parts = self._parts(ref)
        search = asyncio.create_task(self._merged(ref, parts) if parts else self._found(ref))
        if is_joined:
            self._searches[ref] = search
        search.add_done_callback(lambda search: self._end(ref, search))
        return search

    def _give_up(self, ref: AdapterRef, search: "asyncio.Task[Adapter]") -> None:
        """One that has not begun never does. Nobody joins it any more."""
        search.cancel()
        if self._searches.get(ref) is search:
            del self._searches[ref]

    def _end(self, ref: AdapterRef, search: "asyncio.Task[Adapter]") -> None:
        if self._searches.get(ref) is search:
            del self._searches[ref]
        if not search.cancelled():
            search.exception()  # told to those who wait, if there are any left

    async def _found(self, ref: AdapterRef) -> Adapter:
        asked = time.monotonic()
        is_here = self._store.is_local(ref) or await self.look(lambda: self._is_on_disk(ref))
        threads = self._readers if is_here else self._finders  # what is here does not wait for downloads
        async with self._turn((self._place(ref), is_here), NUM_AT_A_PLACE):
            adapter = await asyncio.get_running_loop().run_in_executor(threads, lambda: self._store.find(ref, asked))
        adapter.account = account_of(self._store.named(ref), adapter.path)
        return _of_its_place(adapter)

    @asynccontextmanager
    async def _turn(self, place: TurnKey, num_at_once: int) -> AsyncIterator[None]:
        search = asyncio.current_task()
        self._unbegun.add(search)
        try:
            with counted(self._num_at, place):
                async with self._turns.setdefault(place, asyncio.Semaphore(num_at_once)):
                    self._unbegun.discard(search)
                    yield
        finally:
            self._unbegun.discard(search)
            if not self._num_at[place]:
                self._turns.pop(place, None)

    def _is_on_disk(self, ref: AdapterRef) -> bool:
        """And its source need not be asked what it has now, nor who may read it, but for those who could a while ago."""
        may_read = not self._store.is_private(ref) or self._store.is_proven(ref)
        return may_read and self._store.is_on_disk(ref) and not self._store.is_stale(ref)

    def _place(self, ref: AdapterRef) -> str:
        """One for all merges of the same adapters: their weights, their order and how often each is named make endlessly many."""
        parts = self._parts(ref)
        if not parts:
            return self._store.place_key(ref)
        return MERGE_OF + account_of_merge(self._store.place_key(part) for part in parts)  # never that of a part, though it be the only one

    def _parts(self, ref: AdapterRef) -> list[AdapterRef]:
        """What it is merged of, each written as those write it who ask for it alone. Raises InvalidRequest."""
        adapter_ids = ref.merge.adapter_ids if ref.merge else ()
        parts = (self._store.named(AdapterRef(adapter_id=adapter_id, source=ref.source)) for adapter_id in adapter_ids)
        return [msgspec.structs.replace(part, api_token=ref.api_token) for part in parts]

    async def _merged(self, ref: AdapterRef, refs: Sequence[AdapterRef]) -> Adapter:
        parts: list[Adapter] = []
        for wanted in refs:
            parts.append(await self.find(wanted))  # goes on without this merge, and is joined by the next
            await self.look(lambda: self._store.check_merge(ref, parts))
        loop = asyncio.get_running_loop()
        merged = await loop.run_in_executor(self._readers, lambda: self._store.held_merge(ref, parts))
        if merged is None:
            async with self._turn((self._place(ref), False), num_at_once=1), self._merges:
                with _among(self._merging, asyncio.current_task()), ExitStack() as kept:
                    for part in parts:  # not before: who holds a part and waits for room would keep others from theirs
                        kept.enter_context(self._needed(part))
                    merged = await loop.run_in_executor(self._mergers, lambda: self._store.merged(ref, parts))
        merged.account = account_of_merge(part.account for part in parts)
        merged.is_private = any(part.is_private for part in parts)
        return _of_its_place(merged)


@contextmanager
def _among(members: set[T], one: T) -> Iterator[None]:
    members.add(one)
    try:
        yield
    finally:
        members.discard(one)


def _of_its_place(adapter: Adapter) -> Adapter:
    """Unloading one of two adapters with equal files must leave the other alone."""
    adapter.version = hashlib.blake2b(f"{adapter.path}\0{adapter.version}".encode(), digest_size=16).hexdigest()
    return adapter
