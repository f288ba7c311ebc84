"""Downloaded adapters on disk, bounded in bytes, shared by the processes of one node. Knows neither where they come from nor who asks.

<key>/entry.json says which version of a place is to be used, <key>/<version>/ holds it; a version is the hash of its files, so that
another content is another folder. partial/<key>.<bytes>/ is being downloaded. What counts is the disk: nothing is kept in memory.
"""

import logging
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import msgspec
from filelock import FileLock, Timeout

from loray.deployments.adapter_files import content_hash
from loray.deployments.adapter_sources import EXTRA_FILES, FILES

logger = logging.getLogger("ray.serve.loray")

ENTRY_FILE = "entry.json"


class Entry(msgspec.Struct, frozen=True):
    name: str  # what a request calls it; "" = none can
    version: str
    stamp: str  # of the source, when it was read
    is_private: bool


class DiskFull(Exception):
    pass


@dataclass(frozen=True, slots=True)
class _Held:
    path: Path
    num_bytes: int
    last_used: float  # seconds since 1970


class DiskCache:
    """in_use: whether a version's folder has to stay."""

    def __init__(self, folder: Path, max_bytes: int, in_use: Callable[[str], bool]) -> None:
        self._folder = folder
        self._partial = folder / "partial"
        self._locks = folder / "locks"
        self._max_bytes = max_bytes
        self._in_use = in_use
        self._is_clean = False
        self._cleaning = threading.Lock()

    def entry(self, key: str) -> Entry | None:
        try:
            return msgspec.json.decode((self._folder / key / ENTRY_FILE).read_bytes(), type=Entry)
        except (OSError, msgspec.MsgspecError):
            return None

    def entries(self) -> list[Entry]:
        keys = [file.parent.name for file in self._folder.glob(f"*/{ENTRY_FILE}")]
        return [entry for key in keys if (entry := self.entry(key))]

    def stamps(self, max_keys: int) -> dict[str, str]:
        """Of each key's entry, what changes with it; none is read."""
        stamps: dict[str, str] = {}
        with suppress(OSError), os.scandir(self._folder) as keys:
            for key in islice(keys, max_keys):
                with suppress(OSError):  # no key, or removed meanwhile
                    entry = os.stat(f"{key.path}/{ENTRY_FILE}")
                    stamps[key.name] = f"{entry.st_ino}-{entry.st_mtime_ns}"
        return stamps

    def set_entry(self, key: str, entry: Entry) -> None:
        (self._folder / key).mkdir(parents=True, exist_ok=True)
        written = self._folder / key / f"{ENTRY_FILE}.{os.getpid()}"
        written.write_bytes(msgspec.json.encode(entry))
        written.replace(self._folder / key / ENTRY_FILE)

    def path(self, key: str, version: str) -> Path:
        return self._folder / key / version

    def touch(self, path: Path) -> None:
        """It was used now."""
        with suppress(OSError):  # evicted meanwhile by another process
            os.utime(path)

    def num_bytes(self, key: str) -> int:
        return sum(held.num_bytes for held in self._held(self._folder / key))

    @contextmanager
    def only_one(self, key: str) -> Iterator[None]:
        """Of all processes on this node; the lock's file stays, since removing it would let two in."""
        self._locks.mkdir(parents=True, exist_ok=True)
        with FileLock(self._locks / f"{key}.lock"):
            yield

    @contextmanager
    def staging(self, key: str, num_bytes: int) -> Iterator[Path]:
        """A folder to download into, for who is the only one of its key; room for num_bytes is made before."""
        self._clean()
        with self.only_one("room"):  # held while files are counted and deleted, never while any are read from afar
            for left in self._partial.glob(f"{key}.*"):  # by a process that died
                shutil.rmtree(left, ignore_errors=True)
            self._make_room(num_bytes)
            folder = self._partial / f"{key}.{num_bytes}"
            folder.mkdir(parents=True)
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def publish(self, key: str, staged: Path, entry: Entry) -> Path:
        """From now on this is the key's version. Nobody looks into the folder before the entry names it."""
        folder = self.path(key, entry.version)
        stays = is_whole(folder, entry.version)  # who uses it would notice other files, even equal ones
        with self.only_one("room"):
            folder.mkdir(parents=True, exist_ok=True)
            for name in () if stays else FILES:
                os.replace(staged / name, folder / name)
            for name in EXTRA_FILES:  # of no version: they change without it
                if (staged / name).exists():
                    os.replace(staged / name, folder / name)
                else:
                    (folder / name).unlink(missing_ok=True)
            self.touch(folder)
            self.set_entry(key, entry)
            shutil.rmtree(staged, ignore_errors=True)
        return folder

    def remove(self, key: str) -> None:
        """Versions in use stay until their room is needed."""
        if not (self._folder / key).is_dir():
            return
        with self.only_one(key), self.only_one("room"):
            (self._folder / key / ENTRY_FILE).unlink(missing_ok=True)
            for held in self._held(self._folder / key):
                if not self._in_use(str(held.path)):
                    self._delete(held.path)

    def _held(self, folder: Path) -> list[_Held]:
        """The versions in the folder of one key."""
        held = []
        with suppress(OSError):  # evicted meanwhile by another process
            for path in folder.iterdir():
                if path.is_dir():
                    num_bytes = sum(file.stat().st_size for file in path.iterdir())
                    held.append(_Held(path, num_bytes, path.stat().st_mtime))
        return held

    def _make_room(self, num_bytes: int) -> None:
        keys = [folder for folder in self._folder.iterdir() if folder not in (self._partial, self._locks)]
        held = sorted((one for key in keys for one in self._held(key)), key=lambda one: one.last_used)
        coming = sum(int(folder.name.rpartition(".")[2]) for folder in self._partial.glob("*.*"))
        excess = sum(one.num_bytes for one in held) + coming + num_bytes - self._max_bytes
        idle = [one for one in held if not self._in_use(str(one.path))]
        if excess > sum(one.num_bytes for one in idle):
            raise DiskFull(f"{num_bytes} bytes are more than adapters.disk_bytes ({self._max_bytes}) has left")
        for one in idle:
            if excess <= 0:
                break
            logger.info("evicting %s from the disk cache: %d bytes", one.path.parent.name, one.num_bytes)
            self._delete(one.path)
            excess -= one.num_bytes

    def _delete(self, version: Path) -> None:
        entry = self.entry(version.parent.name)
        if entry and entry.version == version.name:
            (version.parent / ENTRY_FILE).unlink(missing_ok=True)
        shutil.rmtree(version, ignore_errors=True)
        with suppress(OSError):  # it has other versions
            version.parent.rmdir()

    def _clean(self) -> None:
        """Once in a process: removes downloads that a dead process left, so that they do not count."""
        with self._cleaning:
            if self._is_clean:
                return
            self._is_clean = True
            self._locks.mkdir(parents=True, exist_ok=True)
            for left in self._partial.glob("*.*"):
                lock = FileLock(self._locks / f"{left.name.rpartition('.')[0]}.lock")
                with suppress(Timeout), lock.acquire(timeout=0):
                    shutil.rmtree(left, ignore_errors=True)


def is_whole(folder: Path, version: str) -> bool:
    try:
        return content_hash(folder) == version
    except OSError:
        return False
