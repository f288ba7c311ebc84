"""Which adapters sit in which rank pages, and who uses them. Pure bookkeeping: never touches tensors, files or Ray."""

from collections import OrderedDict
from dataclasses import dataclass, field

from loray.models.step import AdapterLoad


@dataclass(eq=False, slots=True)
class Adapter:
    """One version of an adapter. Another version of the same id is another Adapter."""

    adapter_id: str
    version: str  # changes with the files' content
    path: str
    num_pages: int
    signature: str = ""  # of the files, as they were validated
    page_ids: list[int] = field(default_factory=list)  # empty = not in the pool
    references: int = 0  # unfinished requests that use it


class AdapterTable:
    """The pool's pages. An adapter in use is never evicted; of the others, the least recently used goes first."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._free_pages = list(range(num_pages - 1, -1, -1))
        self._known: dict[str, Adapter] = {}  # by version: in the pool, or waited for
        self._idle: OrderedDict[str, Adapter] = OrderedDict()  # in the pool, used by nobody, least recently used first
        self._num_idle_pages = 0
        self.num_references = 0
        self.num_resident = 0

    @property
    def num_used_pages(self) -> int:
        return self.num_pages - len(self._free_pages)

    def acquire(self, adapter: Adapter) -> Adapter:
        """Count one more user; the answer is the table's own object for that version."""
        adapter = self._known.setdefault(adapter.version, adapter)
        adapter.references += 1
        self.num_references += 1
        if self._idle.pop(adapter.version, None):
            self._num_idle_pages -= adapter.num_pages
        return adapter

    def release(self, adapter: Adapter) -> None:
        adapter.references -= 1
        self.num_references -= 1
        assert adapter.references >= 0, "an adapter is released as often as it was acquired"
        if adapter.references == 0:
            if adapter.page_ids:
                self._idle[adapter.version] = adapter
                self._num_idle_pages += adapter.num_pages
            else:
                del self._known[adapter.version]

    def can_place(self, adapter: Adapter) -> bool:
        return adapter.num_pages <= len(self._free_pages) + self._num_idle_pages

    def place(self, adapter: Adapter) -> AdapterLoad:
        """Give an adapter that is not in the pool its pages; the ranks must then load it."""
        assert not adapter.page_ids and adapter.references > 0, "only a wanted adapter outside the pool is placed"
        assert self.can_place(adapter), "the caller checks can_place first"
        while len(self._free_pages) < adapter.num_pages:
            self._evict_oldest()
        adapter.page_ids = self._take_pages(adapter.num_pages)
        self.num_resident += 1
        return AdapterLoad(path=adapter.path, page_ids=adapter.page_ids, signature=adapter.signature)

    def _take_pages(self, count: int) -> list[int]:
        """Consecutive pages where there are some, since a run of pages is one matrix product on the ranks."""
        free = sorted(self._free_pages)
        start = next((i for i in range(len(free) - count + 1) if free[i + count - 1] - free[i] == count - 1), 0)
        taken = free[start : start + count]
        self._free_pages = free[:start] + free[start + count :]
        return taken

    def discard(self, adapter: Adapter) -> None:
        """Take its pages, whatever is in them; who asks for it again starts anew. Without pages there is nothing to do."""
        if not adapter.page_ids:
            return
        self._free_pages += adapter.page_ids
        adapter.page_ids = []
        self.num_resident -= 1
        if adapter.references == 0:
            del self._idle[adapter.version]
            self._num_idle_pages -= adapter.num_pages
            del self._known[adapter.version]

    def _evict_oldest(self) -> None:
        adapter = next(iter(self._idle.values()))
        assert adapter.references == 0, "an adapter in use is never evicted"
        self.discard(adapter)
