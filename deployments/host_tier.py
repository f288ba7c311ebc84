"""Which adapters lie in the ranks' host memory, on their way to the pool. Pure bookkeeping: never touches tensors, files or Ray.

It keeps to its bytes: what is to be read waits until there is room, and room is made by dropping what no waiting request needs, the
least recently wanted first.
"""

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

from loray.deployments.adapters import Adapter
from loray.models.step import HostCopy


@dataclass(eq=False, slots=True)
class _Entry:
    adapter: Adapter
    num_bytes: int  # while it is being read: the most it can need
    is_here: bool = False
    is_unwanted: bool = False  # dropped as soon as it has been read

    @property
    def is_needed(self) -> bool:
        """It is on its way here, or waits here for its place in the pool."""
        is_wanted = self.adapter.is_pinned or self.adapter.is_awaited
        return not self.is_here or (is_wanted and not self.adapter.page_ids)


class HostTier:
    def __init__(self, max_bytes: int, page_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self.num_evictions = 0
        self._page_bytes = page_bytes  # of the rank that needs most
        self._entries: OrderedDict[HostCopy, _Entry] = OrderedDict()  # least recently wanted first
        self._next: Adapter | None = None  # the first that found no room
        self._prepares: list[HostCopy] = []
        self._drops: list[HostCopy] = []

    @property
    def num_adapters(self) -> int:
        return len(self._entries)

    def could_hold(self, adapter: Adapter, pinned: Iterable[Adapter]) -> bool:
        """Whether there would be room for it if nothing but the pinned adapters was here."""
        return self._most_bytes(adapter) + self._kept_bytes(adapter, pinned) <= self.max_bytes

    def could_pin(self, adapter: Adapter, pinned: Iterable[Adapter], returning: Iterable[Adapter]) -> bool:
        """Whether that would leave room for others, and enough for those that are to go on."""
        num_left = self.max_bytes - self._most_bytes(adapter) - self._kept_bytes(adapter, pinned)
        others = (other for other in returning if other is not adapter and not other.is_pinned)
        return num_left >= max(map(self._most_bytes, others), default=self._page_bytes)

    def bytes_of(self, adapter: Adapter) -> int:
        entry = self._entries.get(adapter.host_copy)
        return entry.num_bytes if entry and entry.is_here else 0

    def is_loading(self, adapter: Adapter) -> bool:
        entry = self._entries.get(adapter.host_copy)
        return entry is not None and not entry.is_here

    def want(self, adapter: Adapter) -> None:
        """Have it read, unless it is here or in the pool. Where there is no room for it now, nothing happens: ask again later."""
        entry = self._entries.get(adapter.host_copy)
        if entry:
            assert entry.adapter is adapter, "there is one object for each version"
            entry.is_unwanted = False
            self._entries.move_to_end(adapter.host_copy)
            return
        adapter.is_ready = False
        if adapter.page_ids or (self._is_room_kept and adapter is not self._next):
            return
        if not self._make_room(self._most_bytes(adapter)):
            self._next = adapter
            return
        self._next = None
        entry = self._entries[adapter.host_copy] = _Entry(adapter, self._most_bytes(adapter))
        self.num_bytes += entry.num_bytes
        adapter.is_in_host, adapter.error = True, ""
        self._prepares.append(adapter.host_copy)

    def want_again(self, adapters: Iterable[Adapter]) -> None:
        """Those that may have found no room. The one that all others wait for is tried first, wherever it stands in line."""
        if self._next and self._is_room_kept:
            self.want(self._next)
        for adapter in adapters:
            self.want(adapter)

    def arrived(self, copy: HostCopy, num_bytes: int, seconds: float) -> Adapter:
        """All ranks have it, after so many seconds of reading."""
        entry = self._entries[copy]
        self.num_bytes += num_bytes - entry.num_bytes
        entry.is_here, entry.num_bytes = True, num_bytes
        entry.adapter.is_ready = True
        entry.adapter.host_use.num_loads += 1
        entry.adapter.host_use.load_seconds += seconds
        if entry.is_unwanted:
            self._remove(copy)
        return entry.adapter

    def failed(self, copy: HostCopy, reason: str) -> Adapter:
        """Some rank could not read it; those that could forget it."""
        adapter = self._remove(copy)
        adapter.error = reason
        return adapter

    def drop(self, adapter: Adapter) -> None:
        """As soon as that is possible. Nothing happens if it is not here."""
        entry = self._entries.get(adapter.host_copy)
        if entry and entry.is_here:
            self._remove(adapter.host_copy)
        elif entry:
            entry.is_unwanted = True

    def take_orders(self) -> tuple[list[HostCopy], list[HostCopy]]:
        """What the ranks are to prepare and to drop, since the last call; never the same in both."""
        drops, self._drops = self._drops, []
        prepares = [copy for copy in self._prepares if copy not in drops]
        self._prepares = [copy for copy in self._prepares if copy in drops]
        return prepares, drops

    def _most_bytes(self, adapter: Adapter) -> int:
        return adapter.num_pages * self._page_bytes + adapter.extra_bytes

    def _kept_bytes(self, adapter: Adapter, pinned: Iterable[Adapter]) -> int:
        """What the other pinned adapters may take, until they are in the pool for good."""
        outside = (other for other in pinned if other is not adapter and not other.page_ids)
        return sum(self.bytes_of(other) or self._most_bytes(other) for other in outside)

    @property
    def _is_room_kept(self) -> bool:
        """Room that comes free is kept for the first that found none, else small ones would pass a large one forever."""
        return self._next is not None and self._next.is_awaited and not self._next.page_ids

    def _make_room(self, num_bytes: int) -> bool:
        missing = self.num_bytes + num_bytes - self.max_bytes
        victims = []
        unneeded = [(copy, entry) for copy, entry in self._entries.items() if not entry.is_needed] if missing > 0 else []
        for copy, entry in sorted(unneeded, key=lambda one: one[1].adapter.references > 0):  # running answers may need it once more
            if missing > 0:
                victims.append(copy)
                missing -= entry.num_bytes
        if missing > 0:
            return False
        for copy in victims:
            self.num_evictions += 1
            self._remove(copy).host_use.num_evictions += 1
        return True

    def _remove(self, copy: HostCopy) -> Adapter:
        entry = self._entries.pop(copy)
        entry.adapter.is_ready = entry.adapter.is_in_host = False
        self.num_bytes -= entry.num_bytes
        self._drops.append(copy)
        return entry.adapter
