"""One lock for each key, there as long as somebody holds it or waits for it. For the threads of one process."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class KeyedLock:
    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._locks: dict[str, tuple[threading.Lock, int]] = {}  # key -> lock, how many hold it or wait

    def in_use(self) -> list[str]:
        with self._guard:
            return list(self._locks)

    def __len__(self) -> int:
        return len(self._locks)

    @contextmanager
    def only_one(self, key: str) -> Iterator[None]:
        with self._guard:
            lock, num_users = self._locks.get(key, (threading.Lock(), 0))
            self._locks[key] = (lock, num_users + 1)
        try:
            with lock:
                yield
        finally:
            with self._guard:
                _, num_users = self._locks.pop(key)
                if num_users > 1:
                    self._locks[key] = (lock, num_users - 1)
