"""Where each adapter is, in the pool and in host memory, and what may be asked of it from outside. Belongs to the engine's thread.

Pure bookkeeping: never touches tensors, files or Ray.
"""

from collections.abc import Callable, Collection
from pathlib import PurePath

import msgspec

from loray.deployments.adapter_room import too_many_bytes, too_many_pages
from loray.deployments.adapter_status import TierUse
from loray.deployments.adapters import Adapter, AdapterTable
from loray.deployments.errors import AdapterFailed
from loray.deployments.expiring import Expiring
from loray.deployments.host_tier import HostTier
from loray.models.step import HostCopy

FAILURE_S = 10.0  # how long a failure is answered without trying again
MAX_FAILURES = 1000


class AdapterPlace(msgspec.Struct, frozen=True):
    """Where one version of an adapter is."""

    num_pages: int  # in the pool
    host_bytes: int
    is_loading: bool
    is_pinned: bool
    pool_use: TierUse
    host_use: TierUse


class AdapterTiers:
    def __init__(self, table: AdapterTable, host: HostTier) -> None:
        self.table = table
        self.host = host
        self.has_new_pins = False  # those who wait may not fit any more
        # By version and signature, why the ranks could not read it: equal files that were written again are another try.
        self._failures: Expiring[tuple[str, str], str] = Expiring(FAILURE_S, MAX_FAILURES)
        self._pinned: dict[str, Adapter] = {}  # by version; held here, so that they stay known
        self._leaving: dict[Adapter, list[Callable[[], object]]] = {}  # unloaded while in use -> whom to tell when they are gone
        self._unread: dict[Adapter, list[Callable[[], object]]] = {}  # wanted by requests -> whom to tell when they are in memory

    def load(self, adapter: Adapter) -> Adapter:
        """Have it read into host memory, before anybody asks for it. The answer is the one object of its version."""
        adapter = self._wanted(adapter)
        self.host.want(adapter)
        return adapter

    def pin(self, adapter: Adapter) -> Adapter:
        """It stays in host memory until a request brings it into the pool, and then there."""
        adapter = self._wanted(adapter)
        if not adapter.is_pinned:
            if not self.table.could_pin(adapter) or not self.host.could_pin(adapter, self._pinned.values(), self.table.returning):
                raise AdapterFailed(
                    f"adapter {adapter.adapter_id!r} cannot be pinned: with those that are, it would leave no room for others"
                )
            self._pinned[adapter.version] = adapter
            self.table.pin(adapter)
            self.has_new_pins = True
        self.host.want(adapter)
        return adapter

    def want(self, adapter: Adapter, on_read: Callable[[], object]) -> None:
        """For a request. `on_read` is called as soon as the files are needed no more, if that is before all its requests have ended."""
        self.host.want(adapter)
        if adapter.page_ids or adapter.is_ready:
            on_read()
        else:
            self._unread.setdefault(adapter, []).append(on_read)

    def arrived(self, copy: HostCopy, num_bytes: int, seconds: float) -> None:
        """All ranks have it in host memory."""
        for on_read in self._unread.pop(self.host.arrived(copy, num_bytes, seconds), []):
            on_read()

    def failed(self, copy: HostCopy, error: str, is_changed: bool) -> tuple[Adapter, str]:
        """Some rank could not read it. The adapter, and why, by its own name; for a while nobody has it read again, unless its files were
        replaced meanwhile: who has found it before then tries again, and finds the new ones."""
        adapter = self.host.failed(copy, error)
        adapter.error = error.replace(f"adapter {PurePath(copy.path).name!r}", f"adapter {adapter.adapter_id!r}", 1)
        if not is_changed:
            self._failures.put((adapter.version, copy.signature), adapter.error)
        return adapter, adapter.error

    def _wanted(self, adapter: Adapter) -> Adapter:
        """One that was to leave stays; who waited for it to be gone is told that this is over."""
        self.check(adapter)
        adapter = self.table.known(adapter)
        for on_freed in self._leaving.pop(adapter, []):
            on_freed()
        return adapter

    def unpin(self, version: str) -> None:
        adapter = self._pinned.pop(version, None)
        if adapter:
            self.table.unpin(adapter)

    def unload(self, version: str, on_freed: Callable[[], object] = lambda: None) -> None:
        """Free its pages and its host memory once its last request has ended; then, or when it is wanted again, `on_freed` is called."""
        self.unpin(version)
        self._failures.drop(lambda known: known[0] == version)
        adapter = self.table.find(version)
        if adapter is None:
            on_freed()
        else:
            self._leaving.setdefault(adapter, []).append(on_freed)
            self.free_unused(adapter)

    def free_unused(self, adapter: Adapter) -> None:
        """A request of it has ended. If it was the last, one that is to leave goes."""
        if adapter.references:
            return
        self._unread.pop(adapter, None)
        if adapter in self._leaving:
            self.table.discard(adapter)
            self.host.drop(adapter)
            for on_freed in self._leaving.pop(adapter):
                on_freed()

    def check(self, adapter: Adapter) -> None:
        """Raises if it could never be served here, or failed a moment ago."""
        table, host = self.table, self.host
        if failure := self._failures.get((adapter.version, adapter.signature)):
            raise AdapterFailed(failure)
        adapter = table.find(adapter.version) or adapter  # whose own pin does not stand in its way
        if not table.could_place(adapter):
            raise too_many_pages(adapter.adapter_id, adapter.num_pages, table.num_pages, table.num_pinned_pages)
        is_kept = adapter.is_in_host and (adapter.is_pinned or adapter.is_awaited)  # it is never evicted
        if not adapter.page_ids and not is_kept and not host.could_hold(adapter, self._pinned.values()):
            raise too_many_bytes(adapter.adapter_id, host.max_bytes)

    def places(self, versions: Collection[str]) -> dict[str, AdapterPlace]:
        """Of those of these versions that are somewhere."""
        known = {version: adapter for version in versions if (adapter := self.table.find(version))}
        return {
            version: AdapterPlace(
                num_pages=len(adapter.page_ids),
                host_bytes=self.host.bytes_of(adapter),
                is_loading=self.host.is_loading(adapter),
                is_pinned=adapter.is_pinned,
                pool_use=adapter.pool_use + TierUse(),  # of this moment
                host_use=adapter.host_use + TierUse(),
            )
            for version, adapter in known.items()
        }
