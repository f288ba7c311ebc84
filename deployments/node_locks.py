"""Locks between the processes and threads of one node: one for each name, all in one file. Knows nothing of what they guard.

A name is a byte of the file that it need not have; what a process has locked is free when it dies. A lock belongs to an open file, not to
a process (fcntl's OFD locks): two that the same process opens are as far apart as those of two processes.
"""

import fcntl
import hashlib
import os
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

FLOCK = "hhqqi4x"  # struct flock: type, whence, start, len, pid


class NodeLocks:
    def __init__(self, file: Path) -> None:
        self._file = file
        self._shared: BinaryIO | None = None  # holds all that this object shares
        self._opening = threading.Lock()

    @contextmanager
    def only_one(self, name: str) -> Iterator[None]:
        """Waits until nobody else has it."""
        with self._open() as file:
            _lock(file, fcntl.F_OFD_SETLKW, fcntl.F_WRLCK, name)
            yield

    @contextmanager
    def if_free(self, name: str) -> Iterator[bool]:
        """Waits for nobody; what it yields says whether the name is locked until the end of the block."""
        with self._open() as file:
            try:
                _lock(file, fcntl.F_OFD_SETLK, fcntl.F_WRLCK, name)
                is_locked = True
            except BlockingIOError:
                is_locked = False
            yield is_locked

    def are_free(self, names: list[str]) -> list[bool]:
        """At this moment."""
        with self._open() as file:
            return [_lock(file, fcntl.F_OFD_GETLK, fcntl.F_WRLCK, name) == fcntl.F_UNLCK for name in names]

    @contextmanager
    def shared(self, name: str) -> Iterator[None]:
        """Beside others who share it, whatever `share` and `unshare` do meanwhile. Waits until nobody has it for himself."""
        with self._open() as file:
            _lock(file, fcntl.F_OFD_SETLKW, fcntl.F_RDLCK, name)
            yield

    def share(self, name: str) -> None:
        """Until `unshare`, beside others who share it. Waits for nobody: nothing happens where somebody has it for himself."""
        with suppress(OSError):  # also where the file can't be written: then nobody else can lock it either
            _lock(self._shared_file(), fcntl.F_OFD_SETLK, fcntl.F_RDLCK, name)

    def unshare(self, name: str) -> None:
        with suppress(OSError):
            _lock(self._shared_file(), fcntl.F_OFD_SETLK, fcntl.F_UNLCK, name)

    def _shared_file(self) -> BinaryIO:
        with self._opening:
            if self._shared is None:
                self._shared = self._open()
            return self._shared

    def _open(self) -> BinaryIO:
        self._file.parent.mkdir(parents=True, exist_ok=True)
        return open(os.open(self._file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666), "r+b", buffering=0)


def _lock(file: BinaryIO, command: int, kind: int, name: str) -> int:
    """The kind of lock that the system answers with."""
    start = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest()) >> 2  # an offset is a positive int64
    answer = fcntl.fcntl(file, command, struct.pack(FLOCK, kind, os.SEEK_SET, start, 1, 0))
    return int(struct.unpack(FLOCK, answer)[0])
