"""A memory of limited size whose entries end by themselves. May be used by many threads. Knows nothing of what it holds."""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Expiring(Generic[K, V]):
    """count: as how many entries a value counts."""

    def __init__(
        self,
        lifetime_s: float,
        max_entries: int,
        clock: Callable[[], float] = time.monotonic,
        count: Callable[[V], int] = lambda value: 1,
    ) -> None:
        self._lifetime_s = lifetime_s
        self._max_entries = max_entries
        self._clock = clock
        self._count = count
        self._num_counted = 0
        self._entries: OrderedDict[K, tuple[float, V]] = OrderedDict()  # key -> (when it ends, value), the oldest first
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: K) -> V | None:
        with self._lock:
            end, value = self._entries.get(key, (0.0, None))
            return value if value is not None and self._clock() < end else None

    def put(self, key: K, value: V) -> None:
        with self._lock:
            now = self._clock()
            self._remove(key)
            self._entries[key] = (now + self._lifetime_s, value)
            self._num_counted += self._count(value)
            while self._entries and (self._num_counted > self._max_entries or next(iter(self._entries.values()))[0] <= now):
                self._remove(next(iter(self._entries)))

    def drop(self, is_dropped: Callable[[K], bool]) -> None:
        with self._lock:
            for key in [key for key in self._entries if is_dropped(key)]:
                self._remove(key)

    def _remove(self, key: K) -> None:
        if key in self._entries:
            _, value = self._entries.pop(key)
            self._num_counted -= self._count(value)
