"""The folders whose files have to stay on disk: of adapters that requests and loads need now, and of pinned ones. Deletes nothing."""

from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import contextmanager

from loray.deployments.adapters import Adapter
from loray.deployments.counting import counted
from loray.deployments.request import AdapterRef


class NeededFolders:
    """Changed by the driver's event loop alone; any thread may ask whether a folder is among them."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()  # folder -> requests and loads that need its files
        self._pinned: dict[AdapterRef, str] = {}  # replaced, never changed: other threads look at it

    def __contains__(self, path: str) -> bool:
        return path in self._counts or path in self._pinned.values()

    @contextmanager
    def needed(self, adapter: Adapter) -> Iterator[None]:
        with counted(self._counts, adapter.path):
            yield

    def pin(self, ref: AdapterRef, path: str) -> None:
        self._pinned = self._pinned | {ref: path}

    def unpin(self, refs: Collection[AdapterRef]) -> None:
        self._pinned = {ref: path for ref, path in self._pinned.items() if ref not in refs}
