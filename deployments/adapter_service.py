"""A driver replica's adapters: finds them for requests, counts their use, and does what admins want. Lives on the driver's event loop.

Knows neither tensors nor Ray. What blocks runs in threads of its own: a slow download holds up nobody but those who wait for it.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from loray.deployments.adapter_arrival import arrival, logged_load
from loray.deployments.adapter_callers import AdapterCallers
from loray.deployments.adapter_finder import AdapterFinder, Store
from loray.deployments.adapter_records import AdapterRecord, AdapterRecords, now_ms
from loray.deployments.adapter_report import AdapterReport
from loray.deployments.adapter_status import AdapterStatus, TierUse
from loray.deployments.adapter_template import adapter_template
from loray.deployments.adapter_tiers import AdapterTiers
from loray.deployments.adapter_use import AdapterUse
from loray.deployments.adapter_uses import AdapterUses
from loray.deployments.adapter_wishes import AdapterWishes
from loray.deployments.adapters import Adapter
from loray.deployments.engine import ABORTED, Engine
from loray.deployments.errors import AdapterFailed, AdapterNotFound, LorayError
from loray.deployments.needed_folders import NeededFolders
from loray.deployments.replaced_adapters import ReplacedAdapters
from loray.deployments.request import AdapterRef, AdapterTemplate
from loray.deployments.slow_work import told_when_slow

logger = logging.getLogger("ray.serve.loray")
T = TypeVar("T")

NUM_LOADS = 4  # that wait for their arrival at once: what is on its way may take more room than it will need
RETRY_S = 15.0  # between two tries to load what is pinned
BEGUN_S = 0.2  # between finding an adapter and beginning with it
SLOW_S = 20.0  # a search that takes longer is slow


class AdapterService:
    def __init__(self, store: Store, engine: Engine, max_waiting: int, page_bytes: int) -> None:
        self._store = store
        self._engine = engine
        self._folders = NeededFolders(store, lambda path: self._in_background(self._finder.free(path)))
        self._finder = AdapterFinder(store, max_waiting, self._folders.needed)
        self._report = AdapterReport(store, engine, self._finder, page_bytes)
        self._loads = asyncio.Semaphore(NUM_LOADS)
        self._num_searches = 0
        self._unloading: list[AdapterUse] = []  # until their last request has ended
        self._wishes = AdapterWishes(self._key, store.place_key)
        self._uses = AdapterUses(lambda use: self._wishes.of(use) is not None)
        self._callers = AdapterCallers(self._wishes.left_over, self._end_left_over)
        self._replaced = ReplacedAdapters()
        self._started = now_ms()
        self._preloaded: set[AdapterRef] = set()
        self._retries: dict[AdapterRef, asyncio.TimerHandle] = {}  # of loads that failed
        self._tasks: set[asyncio.Task[None]] = set()

    async def find(self, ref: AdapterRef) -> Adapter:
        """The adapter as it is to be served now. Raises a LorayError."""
        self._num_searches += 1
        number, known = self._num_searches, self._uses.get(self._key(ref))
        adapter = await self._finder.find(msgspec.structs.replace(self._key(ref), api_token=ref.api_token))
        if known and self._uses.get(known.ref) is not known:  # unloaded meanwhile; known again as soon as a request begins with it
            return adapter
        use = self._use(ref)
        if number < use.found:  # a later search was quicker, and knows better what is the newest
            return adapter
        old, use.adapter, use.found = use.adapter, adapter, number
        if old and old.version != adapter.version:
            wanted = self._wishes.versions(self._uses)
            if not wanted.get(old.version):  # else another id means the same files, and has them pinned
                leave = AdapterTiers.unpin if old.version in wanted else AdapterTiers.unload
                self._engine.call(partial(leave, version=old.version))
            record = self._wishes.of(use)
            if record and record.is_pinned:
                self._in_background(self._load_and_log(record))
        return adapter

    def asked(self, ref: AdapterRef, began_ms: int = 0) -> AbstractContextManager[None]:
        """Around all of one request, from before its adapter is found. began_ms: as in GenerationRequest."""
        return self._callers.counted(self._key(ref), began_ms)

    async def find_patiently(self, ref: AdapterRef, on_slow: Callable[[], None]) -> Adapter:
        """The same, and whoever waits is told in time: a download may take longer than an ingress waits for a replica."""
        with self._noted_failure(ref):
            return await told_when_slow(self.find(ref), SLOW_S, on_slow)

    async def chat_template(self, ref: AdapterRef) -> AdapterTemplate:
        """Raises a LorayError."""
        with self.asked(ref), self._noted_failure(ref):
            adapter = await self.find(ref)
        return await self.template_of(ref, adapter)

    async def template_of(self, ref: AdapterRef, adapter: Adapter) -> AdapterTemplate:
        """Raises a LorayError."""
        with self._noted_failure(ref), self._folders.needed(adapter):
            text = await self._finder.look(lambda: adapter_template(Path(adapter.path), adapter.adapter_id))
        return AdapterTemplate(text, adapter.template_version)

    @contextmanager
    def _noted_failure(self, ref: AdapterRef) -> Iterator[None]:
        """Of a request that ends before it can be counted."""
        try:
            yield
        except LorayError as error:
            if use := self._uses.get(self._key(ref)):
                use.num_failed += 1
                if isinstance(error, AdapterFailed) and not isinstance(error, AdapterNotFound):  # also said to who may not read it
                    use.last_failure = error.message
            raise

    @contextmanager
    def counted(self, ref: AdapterRef, adapter: Adapter) -> Iterator[tuple[Callable[[], None], Callable[[str, str], None]]]:
        """Around one request of an adapter that was found. What it yields is told when the adapter's files are needed no more, and how the
        request ended: the error and its message."""
        use, began = self._use(ref), time.monotonic()
        use.adapter = use.adapter or adapter  # what was unloaded since it was found is in use again
        use.num_running += 1

        def ended(error: str, reason: str = "") -> None:
            use.num_failed += error not in ("", ABORTED)
            use.num_served += not error
            if error == AdapterFailed.__name__ or not error:
                use.last_failure = reason
            record = self._wishes.of(use)
            if not error and began > use.failed_at and not adapter.unrenewed and not (record and record.is_pinned):  # a pin is tried again
                use.error = ""

        try:
            with self._folders.needed(adapter) as let_go:
                yield let_go, ended
        finally:
            use.num_running -= 1
            use.last_used = time.time()

    async def load(self, ref: AdapterRef, record: AdapterRecord | None = None, is_renewed: bool = False) -> None:
        """Returns when it is in the host memory of every rank, or when the record is not the newest any more. Raises a LorayError.

        is_renewed: it is an error that its source could not be asked anew, though what is held of it is loaded."""
        use = self._use(ref)
        use.is_loading, use.error = True, ""
        try:
            adapter = await self.find(ref)
            with self._folders.needed(adapter):
                is_pinned = record is not None and record.is_pinned
                num_bytes = await self._finder.look(lambda: self._store.folder_bytes(adapter.path)) if is_pinned else 0
                async with self._loads:
                    if record is None or (self._wishes.still_count(record) and self._uses.get(use.ref) is use):
                        if is_pinned:
                            self._unpin(self._replaced.of(ref.adapter_id))  # there may be room for one of them
                            self._folders.pin(self._key(ref), adapter, num_bytes)
                        work = AdapterTiers.pin if is_pinned else AdapterTiers.load
                        await arrival(self._engine, await self._ask(partial(work, adapter=adapter)))
            if is_renewed and adapter.unrenewed:
                raise AdapterFailed(adapter.unrenewed)
        except LorayError as error:
            use.error, use.failed_at = error.message, time.monotonic()
            raise
        finally:
            use.is_loading = False

    async def preload(self, adapter_ids: list[str]) -> None:
        """One that can't be loaded is told in the log and keeps nobody from serving."""
        self._preloaded.update(self._key(AdapterRef(adapter_id=name)) for name in adapter_ids)
        await asyncio.gather(*(logged_load(self.load(AdapterRef(adapter_id=name)), name) for name in adapter_ids))

    async def apply(self, records: bytes) -> None:
        """Do what admins want, as far as it is new; loads go on in the background."""
        wanted = {record.ref.adapter_id: record for record in msgspec.msgpack.decode(records, type=AdapterRecords).records}
        previous, self._wishes.records = self._wishes.records, wanted
        for adapter_id, record in previous.items():
            if adapter_id not in wanted:
                replaced = self._replaced.drop_all(adapter_id)
                if record.is_pinned:
                    self._unpin([*replaced, record.ref])
                self._forget_failed(record.ref)
        left: list[tuple[str, AdapterRef]] = []
        for adapter_id, record in list(wanted.items()):
            known = previous.get(adapter_id)
            is_old_unload = known is None and not record.is_loaded and record.number < self._started  # done by those who were there
            if (known is None or known.number != record.number) and (not is_old_unload or self._key(record.ref) in self._preloaded):
                try:
                    left += [(adapter_id, ref) for ref in await self._act(record, known)]
                except Exception as error:  # one that can't be done keeps nobody from the others
                    self._try_again(adapter_id, error)
        removals = (self._finder.remove(ref) for _, ref in left)  # all at once: each takes a moment
        for (adapter_id, _), failure in zip(left, await asyncio.gather(*removals, return_exceptions=True), strict=True):
            if failure:
                self._try_again(adapter_id, failure)

    async def statuses(self) -> list[AdapterStatus]:
        """Also of what is being found, and of what is on disk alone, since an earlier process has used it: all can be unloaded."""
        return await self._report.statuses(list(self._uses.values()), list(self._unloading), self._key)

    def disk_use(self) -> TierUse:
        """Of all adapters."""
        return self._store.total_disk_use()

    async def names(self) -> list[str]:
        return await self._finder.names()

    def _try_again(self, adapter_id: str, error: BaseException) -> None:
        logger.error("adapter %s: what an admin wants of it can't be done; the next change tries again", adapter_id, exc_info=error)
        self._wishes.records.pop(adapter_id, None)

    async def _act(self, record: AdapterRecord, known: AdapterRecord | None) -> list[AdapterRef]:
        """What is then left of it on disk alone, to be removed."""
        adapter_id = record.ref.adapter_id
        is_renewed = record.generation > (known.generation if known else 0)  # an undo brings back an older one
        if known and known.is_loaded and self._key(known.ref) != self._key(record.ref):
            if is_renewed:
                self._replaced.add(adapter_id, self._key(known.ref))
            else:  # what was there before, without its pin
                self._unpin([known.ref])
            self._forget_failed(known.ref)
        self._replaced.drop(adapter_id, self._key(record.ref))
        if not record.is_loaded:
            return [ref for ref in (*self._replaced.drop_all(adapter_id), record.ref) if await self._unload(ref)]
        if is_renewed:
            await self._finder.forget(record.ref)
        if not record.is_pinned:  # by this id; another one's pin may have been meant by it before
            self._unpin([*self._replaced.of(adapter_id), record.ref])
        self._use(record.ref).is_loading = True
        self._in_background(self._load_and_log(record, is_renewed))
        return []

    async def _load_and_log(self, record: AdapterRecord, is_renewed: bool = False) -> None:
        is_loaded = await logged_load(self.load(record.ref, record, is_renewed), record.ref.adapter_id)
        self._forget_failed(record.ref)
        await self._unload_replaced(record.ref.adapter_id)
        key = self._key(record.ref)
        if record.is_pinned and self._wishes.still_count(record):
            if former := self._retries.pop(key, None):
                former.cancel()
            if not is_loaded:  # a pin is not lost because its files were away for a moment
                self._retries[key] = asyncio.get_running_loop().call_later(RETRY_S, self._load_again, record)

    def _load_again(self, record: AdapterRecord) -> None:
        self._retries.pop(self._key(record.ref), None)
        use = self._uses.get(self._key(record.ref))
        if use and use.error and not use.is_loading and self._wishes.still_count(record):
            self._in_background(self._load_and_log(record))

    async def _unload_replaced(self, adapter_id: str) -> None:
        """Once what the id means now is there: an undo brings back what it meant before. Loads that were overtaken are waited for."""
        record = self._wishes.records.get(adapter_id)
        use = self._uses.get(self._key(record.ref)) if record else None
        if use and use.adapter and not use.is_loading and not use.error:
            for ref in self._replaced.of(adapter_id):
                if ref not in self._uses or not self._uses[ref].is_loading:
                    self._replaced.drop(adapter_id, ref)
                    await self._unload_wholly(ref)

    async def _unload(self, ref: AdapterRef, is_again: bool = False) -> bool:
        """Whether what is on disk alone is still to be removed. Of a merge: all that go by this name.

        is_again: those that are being found now came after the admin's wish."""
        meant = self._key(ref)
        keys = [key for key in self._uses if key == meant or (key.merge and key.adapter_id == ref.adapter_id)]
        self._unpin(keys)
        uses = [self._uses.pop(key) for key in keys]
        if not any(use.adapter for use in uses) and not self._wishes.is_place_wanted(ref):
            if not self._finder.is_searching(ref):
                return True
            self._in_background(self._unload_found(ref))
            return False
        loop, wanted = asyncio.get_running_loop(), self._wishes.versions(self._uses)
        for use in uses:
            if use.adapter and use.version not in wanted:
                self._unloading.append(use)
                freed = partial(loop.call_soon_threadsafe, self._freed, use)
                await self._ask(partial(AdapterTiers.unload, version=use.adapter.version, on_freed=freed))
        is_merge = any(use.ref.merge for use in uses)
        if is_merge and self._finder.is_searching(ref) and not is_again:
            self._in_background(self._unload_found(ref))
        return is_merge  # those that an earlier process has made, or of other versions of their parts

    async def _unload_found(self, ref: AdapterRef) -> None:
        """One that is being found, once it is. Those who wait for it have begun by then, and are served."""
        await self._finder.ended(ref)
        await asyncio.sleep(BEGUN_S)
        record = self._wishes.records.get(ref.adapter_id)
        if not (record and record.is_loaded):
            await self._unload_wholly(ref, is_again=True)

    def _end_left_over(self, key: AdapterRef, ref: AdapterRef) -> None:
        """Of an unload by `ref` that no replica has lived to end. A merge's is of all by its name."""
        if key.merge or key in self._uses or not any(use.ref == key for use in self._unloading):  # else it is being ended
            self._in_background(self._unload_wholly(ref))

    async def _unload_wholly(self, ref: AdapterRef, is_again: bool = False) -> None:
        if await self._unload(ref, is_again):
            await self._finder.remove(ref)

    def _freed(self, use: AdapterUse) -> None:
        """Or wanted again before its last request had ended; then its files stay."""
        if use.ref in self._uses or use.version in self._wishes.versions(self._uses):
            self._unloading.remove(use)
        else:
            self._in_background(self._remove(use))

    async def _remove(self, use: AdapterUse) -> None:
        try:
            is_wanted = False
            if self._finder.is_searching(use.ref):  # what it finds goes too, unless an admin wants it by then
                await self._finder.ended(use.ref)
                is_wanted = (record := self._wishes.of(use)) is not None and record.is_loaded
            if not is_wanted and not self._wishes.is_place_wanted(use.ref):
                await self._finder.remove(use.ref, use.path)
                logger.info("adapter %s is unloaded", use.ref.adapter_id)
        finally:
            self._unloading.remove(use)

    def _unpin(self, refs: list[AdapterRef]) -> None:
        keys = [self._key(ref) for ref in refs]
        self._folders.unpin(keys)
        wanted = self._wishes.versions(self._uses, keys)
        for use in (self._uses[key] for key in keys if key in self._uses):
            if not wanted.get(use.version):
                self._engine.call(partial(AdapterTiers.unpin, version=use.version))

    async def _ask(self, work: Callable[[AdapterTiers], T]) -> T:
        return await asyncio.wrap_future(self._engine.call(work))

    def _key(self, ref: AdapterRef) -> AdapterRef:
        """Without the token, and with the id written in one way."""
        try:
            return self._store.named(ref)
        except LorayError:  # an id that nobody can have; an admin may ask for it and is told so
            return msgspec.structs.replace(ref, api_token="")

    def _use(self, ref: AdapterRef) -> AdapterUse:
        return self._uses.touch(self._key(ref))

    def _forget_failed(self, ref: AdapterRef) -> None:
        """A load that found nothing, once no admin wants it any more: one by the same name may be there and be meant."""
        use = self._uses.get(self._key(ref))
        if use and not (use.adapter or use.is_loading or use.num_running or self._wishes.of(use)):
            del self._uses[use.ref]

    def _in_background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
