"""Adapters that a rank keeps in host memory, ready for its pages. Which ones to keep and which to drop, the driver knows."""

from collections.abc import Callable
from pathlib import Path
from threading import Lock

from loray.models.adapter import signature
from loray.models.adapter_config import FilesChanged
from loray.models.adapter_tensors import RankAdapter


class HostAdapters:
    """This rank's parts of adapters in host memory (pinned where there is a GPU). Any thread may prepare and drop."""

    def __init__(self, read: Callable[[Path], RankAdapter]) -> None:
        self._read = read
        self._adapters: dict[tuple[str, str], RankAdapter] = {}  # by path and signature
        self._lock = Lock()  # never held while a file is read

    @property
    def num_bytes(self) -> int:
        with self._lock:
            return sum(adapter.num_bytes for adapter in self._adapters.values())

    def prepare(self, path: str, signature: str) -> int:
        """Read and check the folder, unless it is there; the bytes that it holds here. Two threads at once may both read; one is kept."""
        adapter = self.find(path, signature) or self.read(path, signature)
        with self._lock:
            return self._adapters.setdefault((path, signature), adapter).num_bytes

    def drop(self, path: str, signature: str) -> None:
        with self._lock:
            self._adapters.pop((path, signature), None)

    def find(self, path: str, signature: str) -> RankAdapter | None:
        with self._lock:
            return self._adapters.get((path, signature))

    def read(self, path: str, signature: str) -> RankAdapter:
        """Without keeping it. The files must be those that were validated, before and after; an empty signature stands for any."""
        _check_signature(path, signature)
        try:
            return self._read(Path(path))
        finally:
            _check_signature(path, signature)  # why it can't be read may be that it was replaced


def _check_signature(path: str, expected: str) -> None:
    if expected and expected != signature(Path(path)):
        raise FilesChanged(f"adapter {Path(path).name!r}: its files changed after they were checked")
