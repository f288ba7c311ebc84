"""A driver replica's adapters: finds them for requests, counts their use, and does what admins want. Lives on the driver's event loop.

Knows neither tensors nor Ray. What blocks runs in threads of its own: a slow download holds up nobody but those who wait for it.
"""

import asyncio
import logging
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

import msgspec

from loray.deployments.adapter_records import AdapterRecord, AdapterRecords
from loray.deployments.adapter_status import AdapterState, AdapterStatus
from loray.deployments.adapter_tiers import AdapterPlace, AdapterTiers
from loray.deployments.adapters import Adapter
from loray.deployments.engine import ABORTED, Engine
from loray.deployments.errors import AdapterFailed, LorayError, Overloaded
from loray.deployments.request import AdapterRef, MergeRecipe

logger = logging.getLogger("ray.serve.loray")
T = TypeVar("T")

MAX_REMEMBERED = 10_000  # adapters whose use is counted
NUM_FINDERS = 256  # threads at most; most of the time few
ARRIVAL_POLL_S = 0.02


class Store(Protocol):
    """Where adapters come from. Blocking; any thread may call this."""

    def find(self, ref: AdapterRef) -> Adapter: ...
    def forget(self, ref: AdapterRef) -> None: ...
    def remove(self, ref: AdapterRef) -> None: ...
    def disk_bytes(self, ref: AdapterRef) -> int: ...
    def is_private(self, ref: AdapterRef) -> bool: ...
    def merged(self, name: str, parts: list[Adapter], recipe: MergeRecipe) -> Adapter: ...
    def names(self) -> list[str]: ...


@dataclass(eq=False, slots=True)
class _Use:
    """What is known of one adapter id."""

    ref: AdapterRef  # without anybody's token
    adapter: Adapter | None = None  # its newest version
    num_running: int = 0
    num_served: int = 0
    num_failed: int = 0
    last_used: float = 0.0  # seconds since 1970
    is_loading: bool = False
    error: str = ""  # why the last load failed


class AdapterService:
    def __init__(self, store: Store, engine: Engine, max_waiting: int, page_bytes: int) -> None:
        self._store = store
        self._engine = engine
        self._max_waiting = max_waiting  # for one adapter to be found
        self._page_bytes = page_bytes
        self._finders = ThreadPoolExecutor(NUM_FINDERS, "adapter-finder")
        self._uses: OrderedDict[str, _Use] = OrderedDict()  # by adapter id, least recently used first
        self._unloading: list[_Use] = []  # until their last request has ended
        self._paths: Counter[str] = Counter()  # folder -> unfinished requests that use it
        self._searches: dict[str, int] = {}  # adapter id -> requests that wait for it to be found
        self._records: dict[str, AdapterRecord] = {}  # what admins want, as far as it was acted on
        self._tasks: set[asyncio.Task[None]] = set()

    async def find(self, ref: AdapterRef) -> Adapter:
        """The adapter as it is to be served now. Raises a LorayError."""
        num_searches = self._searches.get(ref.adapter_id, 0)
        if num_searches >= self._max_waiting:
            raise Overloaded(f"{num_searches} requests wait for adapter {ref.adapter_id!r} to be found; try again")
        self._searches[ref.adapter_id] = num_searches + 1
        try:
            adapter = await (self._merged(ref, ref.merge) if ref.merge else self._in_thread(lambda: self._store.find(ref)))
        finally:
            self._searches[ref.adapter_id] -= 1
            if not self._searches[ref.adapter_id]:
                del self._searches[ref.adapter_id]
        use = self._use(ref)
        if use.adapter and use.adapter.version != adapter.version and not ref.merge:
            self._engine.call(partial(AdapterTiers.unload, version=use.adapter.version))  # nobody will ask for it again
        use.adapter = adapter
        return adapter

    async def _merged(self, ref: AdapterRef, recipe: MergeRecipe) -> Adapter:
        refs = [AdapterRef(adapter_id=part, source=ref.source, api_token=ref.api_token) for part in recipe.adapter_ids]
        parts = [await self._in_thread(partial(self._store.find, part)) for part in refs]
        return await self._in_thread(lambda: self._store.merged(ref.adapter_id, parts, recipe))

    def in_use(self, path: str) -> bool:
        """Whether a request needs the files in this folder. Any thread may ask."""
        return path in self._paths

    @contextmanager
    def counted(self, ref: AdapterRef, adapter: Adapter) -> Iterator[Callable[[str], None]]:
        """Around one request of an adapter that was found; what it yields is told how the request ended."""
        use = self._use(ref)
        use.num_running += 1
        self._paths[adapter.path] += 1

        def ended(error: str) -> None:
            use.num_failed += error not in ("", ABORTED)
            use.num_served += not error

        try:
            yield ended
        finally:
            use.num_running -= 1
            use.last_used = time.time()
            self._paths[adapter.path] -= 1
            if not self._paths[adapter.path]:
                del self._paths[adapter.path]

    async def load(self, ref: AdapterRef, is_pinned: bool = False) -> None:
        """Returns when it is in the host memory of every rank. Raises a LorayError."""
        use = self._use(ref)
        use.is_loading, use.error = True, ""
        try:
            adapter = await self.find(ref)
            await asyncio.wrap_future(self._engine.call(lambda tiers: tiers.pin(adapter) if is_pinned else tiers.load(adapter)))
            await self._arrival(adapter)
        except LorayError as error:
            use.error = error.message
            raise
        finally:
            use.is_loading = False

    async def preload(self, adapter_ids: list[str]) -> None:
        """All at once; one that can't be loaded is told in the log and keeps nobody from serving."""
        await asyncio.gather(*(self._load_and_log(AdapterRef(adapter_id=adapter_id), False) for adapter_id in adapter_ids))

    async def apply(self, records: bytes) -> None:
        """Do what admins want, as far as it is new; loads go on in the background."""
        wanted = {record.ref.adapter_id: record for record in msgspec.msgpack.decode(records, type=AdapterRecords).records}
        for adapter_id, record in self._records.items():
            if adapter_id not in wanted and record.is_pinned:
                self._unpin(adapter_id)
        for adapter_id, record in wanted.items():
            known = self._records.get(adapter_id)
            if known is None or known.number != record.number:
                await self._act(record, known)
        self._records = wanted

    async def statuses(self) -> list[AdapterStatus]:
        uses = [*self._uses.values(), *self._unloading]
        disk = await self._in_thread(lambda: [(self._store.disk_bytes(use.ref), self._store.is_private(use.ref)) for use in uses])
        versions = [use.adapter.version for use in uses if use.adapter]
        loading = {use for use in uses if use.is_loading}  # before the places: what is loaded by then may be in none of them yet
        places = await asyncio.wrap_future(self._engine.call(lambda tiers: tiers.places(versions)))
        return [self._status(use, places, use in loading, *facts) for use, facts in zip(uses, disk, strict=True)]

    async def names(self) -> list[str]:
        return await self._in_thread(self._store.names)

    async def _act(self, record: AdapterRecord, known: AdapterRecord | None) -> None:
        ref = record.ref
        if not record.is_loaded:
            return await self._unload(ref)
        if known is None or known.generation != record.generation:
            await self._in_thread(lambda: self._store.forget(ref))
        if known and known.is_pinned and not record.is_pinned:
            self._unpin(ref.adapter_id)
        self._use(ref).is_loading = True
        self._in_background(self._load_and_log(ref, record.is_pinned))

    async def _load_and_log(self, ref: AdapterRef, is_pinned: bool) -> None:
        try:
            await self.load(ref, is_pinned)
            logger.info("adapter %s is loaded%s", ref.adapter_id, " and pinned" if is_pinned else "")
        except LorayError as error:
            logger.warning("adapter %s can't be loaded: %s", ref.adapter_id, error.message)

    async def _unload(self, ref: AdapterRef) -> None:
        use = self._uses.pop(ref.adapter_id, None)
        if use is None or use.adapter is None:
            return await self._in_thread(lambda: self._store.remove(ref))
        self._unloading.append(use)
        loop, version = asyncio.get_running_loop(), use.adapter.version
        await asyncio.wrap_future(
            self._engine.call(lambda tiers: tiers.unload(version, lambda: loop.call_soon_threadsafe(self._freed, use)))
        )

    def _freed(self, use: _Use) -> None:
        logger.info("adapter %s is unloaded", use.ref.adapter_id)
        self._unloading.remove(use)
        self._finders.submit(self._store.remove, use.ref)

    def _unpin(self, adapter_id: str) -> None:
        use = self._uses.get(adapter_id)
        if use and use.adapter:
            version = use.adapter.version
            self._engine.call(lambda tiers: tiers.unpin(version))

    async def _arrival(self, adapter: Adapter) -> None:
        while True:
            places = await asyncio.wrap_future(self._engine.call(lambda tiers: tiers.places([adapter.version])))
            place = places.get(adapter.version)
            if place and (place.host_bytes or place.num_pages):
                return
            if place is None or not place.is_loading:
                raise AdapterFailed(f"adapter {adapter.adapter_id!r} could not be read into host memory, or had no room there")
            await asyncio.sleep(ARRIVAL_POLL_S)

    def _use(self, ref: AdapterRef) -> _Use:
        use = self._uses.get(ref.adapter_id)
        if use is None:
            use = self._uses[ref.adapter_id] = _Use(msgspec.structs.replace(ref, api_token=""))
            if len(self._uses) > MAX_REMEMBERED:
                self._uses.popitem(last=False)
        self._uses.move_to_end(ref.adapter_id)
        return use

    def _status(self, use: _Use, places: dict[str, AdapterPlace], is_loading: bool, disk_bytes: int, is_private: bool) -> AdapterStatus:
        adapter = use.adapter
        place = places.get(adapter.version) if adapter else None
        state = "loading" if is_loading else _state(use, place)
        return AdapterStatus(
            adapter_id=use.ref.adapter_id,
            source=use.ref.source,
            revision=use.ref.revision,
            version=adapter.version if adapter else "",
            state="unloading" if use in self._unloading else state,
            rank=adapter.rank if adapter else 0,
            is_pinned=bool(place and place.is_pinned),
            is_private=is_private,
            gpu_bytes=place.num_pages * self._page_bytes if place else 0,
            host_bytes=place.host_bytes if place else 0,
            disk_bytes=disk_bytes,
            num_running=use.num_running,
            num_served=use.num_served,
            num_failed=use.num_failed,
            last_used=use.last_used,
            error=use.error,
        )

    def _in_thread(self, work: Callable[[], T]) -> "asyncio.Future[T]":
        return asyncio.get_running_loop().run_in_executor(self._finders, work)

    def _in_background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _state(use: _Use, place: AdapterPlace | None) -> AdapterState:
    if use.is_loading:
        return "loading"
    if place and place.num_pages:
        return "gpu"
    if place and place.host_bytes:
        return "host"
    if place and place.is_loading:
        return "loading"
    return "failed" if use.error else "known"
