"""The folders whose files have to stay on disk: of adapters that requests and loads need now, and of pinned ones. Deletes nothing."""

from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Protocol

from loray.deployments.adapters import Adapter
from loray.deployments.request import AdapterRef


class Folders(Protocol):
    """Keeps a folder from being deleted, by whichever process. Never blocks."""

    def hold(self, path: str) -> None: ...
    def let_go(self, path: str) -> bool:
        """Whether it is to be deleted: it was unloaded meanwhile."""


class NeededFolders:
    """Belongs to the driver's event loop. on_unloaded: told of a folder that nobody here needs any more and that is to be deleted."""

    def __init__(self, folders: Folders, on_unloaded: Callable[[str], None]) -> None:
        self._folders = folders
        self._on_unloaded = on_unloaded
        self._counts: Counter[str] = Counter()  # folder -> requests, loads and pins that need its files
        self._pinned: dict[AdapterRef, str] = {}

    @contextmanager
    def needed(self, adapter: Adapter) -> Iterator[None]:
        self._add(adapter.path)
        try:
            yield
        finally:
            self._drop(adapter.path)

    def pin(self, ref: AdapterRef, path: str) -> None:
        self._add(path)
        self.unpin([ref])
        self._pinned[ref] = path

    def unpin(self, refs: Collection[AdapterRef]) -> None:
        for ref in refs:
            if ref in self._pinned:
                self._drop(self._pinned.pop(ref))

    def _add(self, path: str) -> None:
        self._counts[path] += 1
        self._folders.hold(path)  # each time: the first may have come while another process was deleting it

    def _drop(self, path: str) -> None:
        self._counts[path] -= 1
        if not self._counts[path]:
            del self._counts[path]
            if self._folders.let_go(path):
                self._on_unloaded(path)
