"""Which adapters sit in which rank pages, and who uses them. Pure bookkeeping: never touches tensors, files or Ray."""

from collections import OrderedDict
from dataclasses import dataclass, field
from weakref import WeakValueDictionary

from loray.deployments.adapter_status import TierUse
from loray.models.step import AdapterLoad, HostCopy


@dataclass(eq=False, slots=True, weakref_slot=True)
class Adapter:
    """One version of an adapter. Another version of the same id is another Adapter."""

    adapter_id: str
    version: str  # changes with the files' content
    path: str
    num_pages: int
    signature: str = ""  # of the files, as they were validated
    rank: int = 0  # the largest of its modules
    account: str = ""  # whom its tokens are charged to, whatever a request calls it; "" = its id
    template_stamp: str = ""  # changes with the files of its chat template
    extra_bytes: int = 0  # at most, of what a rank keeps of it beside its pages
    page_ids: list[int] = field(default_factory=list)  # empty = not in the pool
    references: int = 0  # unfinished requests that use it
    num_held: int = 0  # of these, those that can't start whatever adapters are where: their grammars are not compiled yet
    is_ready: bool = True  # can go into the pool at once; the host tier says when it can't
    is_in_host: bool = False  # or on its way there
    error: str = ""  # why it could not be read into host memory the last time
    unrenewed: str = ""  # why its source could not be asked anew: there may be a newer version
    is_private: bool = False  # only for those whose token may read it
    is_pinned: bool = False  # stays where it is, used or not
    is_apart: bool = False  # has an account of its own, beside that of its other versions; the queue says when
    pool_use: TierUse = field(default_factory=TierUse)
    host_use: TierUse = field(default_factory=TierUse)

    @property
    def is_awaited(self) -> bool:
        """Requests run with it, or would if it was in the pool."""
        return self.references > self.num_held

    @property
    def template_version(self) -> str:
        """Its chat template may change without it."""
        return f"{self.version} {self.template_stamp}"

    @property
    def host_copy(self) -> HostCopy:
        return HostCopy(self.path, self.signature)


class AdapterTable:
    """The pool's pages. An adapter in use or pinned is never evicted; of the others, the least recently used goes first."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._free_pages = list(range(num_pages - 1, -1, -1))
        self._known: WeakValueDictionary[str, Adapter] = WeakValueDictionary()  # by version, as long as anybody holds it
        self._idle: OrderedDict[str, Adapter] = OrderedDict()  # in the pool, used by nobody, least recently used first
        self._num_idle_pages = 0
        self.num_references = 0
        self.num_resident = 0
        self.num_evictions = 0
        self._freed_pages: list[int] = []  # since the ranks were last told
        self.num_pinned_pages = 0
        self._repinned: dict[Adapter, None] = {}  # pinned, or no longer, since the last `take_repinned`
        self.returning: set[Adapter] = set()  # left the pool in the middle of answers, and must find room in spite of pins

    @property
    def num_used_pages(self) -> int:
        return self.num_pages - len(self._free_pages)

    @property
    def num_available_pages(self) -> int:
        """Free, or of adapters that nobody uses."""
        return len(self._free_pages) + self._num_idle_pages

    def acquire(self, adapter: Adapter) -> Adapter:
        """Count one more user; the answer is the table's own object for that version."""
        adapter = self.known(adapter)
        adapter.references += 1
        self.num_references += 1
        self._set_busy(adapter)
        return adapter

    def release(self, adapter: Adapter) -> None:
        adapter.references -= 1
        self.num_references -= 1
        assert adapter.references >= 0, "an adapter is released as often as it was acquired"
        if not adapter.references:
            self.returning.discard(adapter)
        self._set_idle(adapter)

    def pin(self, adapter: Adapter) -> Adapter:
        """Once it is in the pool it stays there; the answer is the table's own object for that version."""
        adapter = self.known(adapter)
        if not adapter.is_pinned:
            adapter.is_pinned = True
            self._repinned[adapter] = None
            self.num_pinned_pages += adapter.num_pages
            self._set_busy(adapter)
        return adapter

    def unpin(self, adapter: Adapter) -> None:
        if adapter.is_pinned:
            adapter.is_pinned = False
            self._repinned[adapter] = None
            self.num_pinned_pages -= adapter.num_pages
            self._set_idle(adapter)

    def take_repinned(self) -> list[Adapter]:
        """Those that have been pinned or unpinned since the last call."""
        repinned, self._repinned = list(self._repinned), {}
        return repinned

    def known(self, adapter: Adapter) -> Adapter:
        """The table's own object for that version. Files that were touched, or lie elsewhere now, count from its next load on."""
        known = self._known.setdefault(adapter.version, adapter)
        if not known.page_ids and not known.is_in_host:
            known.path, known.signature = adapter.path, adapter.signature
        return known

    def find(self, version: str) -> Adapter | None:
        return self._known.get(version)

    def could_pin(self, adapter: Adapter) -> bool:
        """Whether that would leave pages for others, and enough for those that are to go on."""
        num_left = self.num_pages - self.num_pinned_pages - adapter.num_pages
        return num_left >= max((other.num_pages for other in self.returning if other is not adapter and not other.is_pinned), default=1)

    def could_place(self, adapter: Adapter) -> bool:
        """Whether there would be pages for it if nothing but the pinned adapters was there."""
        return adapter.num_pages <= self.num_pages - (0 if adapter.is_pinned else self.num_pinned_pages)

    def can_place(self, adapter: Adapter) -> bool:
        return adapter.num_pages <= self.num_available_pages

    def place(self, adapter: Adapter) -> AdapterLoad:
        """Give an adapter that is not in the pool its pages; the ranks must then load it."""
        assert not adapter.page_ids and adapter.references > 0, "only a wanted adapter outside the pool is placed"
        assert self.can_place(adapter), "the caller checks can_place first"
        while len(self._free_pages) < adapter.num_pages:
            self._evict_oldest()
        adapter.page_ids = self._take_pages(adapter.num_pages)
        self.returning.discard(adapter)
        self.num_resident += 1
        return AdapterLoad(path=adapter.path, page_ids=adapter.page_ids, signature=adapter.signature)

    def _take_pages(self, count: int) -> list[int]:
        """Consecutive pages where there are some, since a run of pages is one matrix product on the ranks."""
        free = sorted(self._free_pages)
        start = next((i for i in range(len(free) - count + 1) if free[i + count - 1] - free[i] == count - 1), 0)
        taken = free[start : start + count]
        self._free_pages = free[:start] + free[start + count :]
        return taken

    def discard(self, adapter: Adapter, is_begun: bool = False) -> None:
        """Take its pages, whatever is in them; who asks for it again starts anew. Without pages there is nothing to do.

        is_begun: answers of it are to go on."""
        if not adapter.page_ids:
            return
        if is_begun:
            self.returning.add(adapter)
        self._free_pages += adapter.page_ids
        self._freed_pages += adapter.page_ids
        adapter.page_ids = []
        self.num_resident -= 1
        self._set_busy(adapter)

    def take_freed_pages(self) -> list[int]:
        """What has been freed since the last call."""
        freed, self._freed_pages = self._freed_pages, []
        return freed

    def _set_busy(self, adapter: Adapter) -> None:
        if self._idle.pop(adapter.version, None):
            self._num_idle_pages -= adapter.num_pages

    def _set_idle(self, adapter: Adapter) -> None:
        """If it may go when pages are needed."""
        if adapter.page_ids and not adapter.references and not adapter.is_pinned and adapter.version not in self._idle:
            self._idle[adapter.version] = adapter
            self._num_idle_pages += adapter.num_pages

    def _evict_oldest(self) -> None:
        adapter = next(iter(self._idle.values()))
        assert adapter.references == 0, "an adapter in use is never evicted"
        self.num_evictions += 1
        adapter.pool_use.num_evictions += 1
        self.discard(adapter)
