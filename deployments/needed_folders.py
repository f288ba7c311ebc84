"""The folders whose files have to stay on disk: of adapters that are to be read into memory, and of pinned ones. Deletes nothing."""

from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import NamedTuple, Protocol

from loray.deployments.adapters import Adapter
from loray.deployments.errors import AdapterFailed
from loray.deployments.request import AdapterRef


class Folders(Protocol):
    """Keeps a folder from being deleted, by whichever process. Never blocks."""

    max_pinned_bytes: int

    def hold(self, path: str) -> None: ...
    def let_go(self, path: str) -> bool:
        """Whether it is to be deleted: it was unloaded meanwhile."""


class _Pinned(NamedTuple):
    path: str
    num_bytes: int  # of the disk tier


class NeededFolders:
    """Belongs to the driver's event loop. on_unloaded: told of a folder that nobody here needs any more and that is to be deleted."""

    def __init__(self, folders: Folders, on_unloaded: Callable[[str], None]) -> None:
        self._folders = folders
        self._on_unloaded = on_unloaded
        self._counts: Counter[str] = Counter()  # folder -> requests, loads and pins that need its files
        self._pinned: dict[AdapterRef, _Pinned] = {}

    @contextmanager
    def needed(self, adapter: Adapter) -> Iterator[Callable[[], None]]:
        """Until the end of the block, or until what it yields is called."""
        self._add(adapter.path)
        paths = [adapter.path]

        def let_go() -> None:
            if paths:
                self._drop(paths.pop())

        try:
            yield let_go
        finally:
            let_go()

    def pin(self, ref: AdapterRef, adapter: Adapter, num_bytes: int) -> None:
        """num_bytes: that its folder has of the disk tier. Raises AdapterFailed."""
        others = {pinned.path: pinned.num_bytes for other, pinned in self._pinned.items() if other != ref}
        num_pinned = sum((others | {adapter.path: num_bytes}).values())
        if num_bytes and num_pinned > self._folders.max_pinned_bytes:
            raise AdapterFailed(
                f"adapter {adapter.adapter_id!r} cannot be pinned: with those that are, it would take {num_pinned} bytes on disk, and pins "
                f"may take half of adapters.disk_bytes ({self._folders.max_pinned_bytes})"
            )
        self._add(adapter.path)
        self.unpin([ref])
        self._pinned[ref] = _Pinned(adapter.path, num_bytes)

    def unpin(self, refs: Collection[AdapterRef]) -> None:
        for ref in refs:
            if ref in self._pinned:
                self._drop(self._pinned.pop(ref).path)

    def _add(self, path: str) -> None:
        self._counts[path] += 1
        self._folders.hold(path)  # each time: the first may have come while another process was deleting it

    def _drop(self, path: str) -> None:
        self._counts[path] -= 1
        if not self._counts[path]:
            del self._counts[path]
            if self._folders.let_go(path):
                self._on_unloaded(path)
