"""Downloaded adapters on disk, bounded in bytes, shared by the processes of one node. Knows neither where they come from nor who asks.

<key>/entry.json says which version of a place is to be used, <key>/<version>/ holds it; a version is the hash of its files, so that
another content is another folder. partial/<key>.<bytes>/ is being downloaded. What counts is the disk: nothing is kept in memory but what
an entry that has not changed says.
A process that needs a version's files holds a lock on it; whoever deletes it has that lock for himself.
"""

import logging
import os
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import msgspec

from loray.deployments.adapter_files import content_hash
from loray.deployments.adapter_sources import EXTRA_FILES, FILES
from loray.deployments.adapter_status import TierUse
from loray.deployments.disk_room import DiskBusy, DiskRoom
from loray.deployments.node_locks import NodeLocks
from loray.deployments.request import AdapterRef
from loray.deployments.tier_uses import TierUses

logger = logging.getLogger("ray.serve.loray")

ENTRY_FILE = "entry.json"
REMOVED_FILE = "removed"  # in a version's folder: to be deleted as soon as nobody holds it
MAX_REMEMBERED = 50_000  # entries
FOUND_S = 0.2  # that may pass between finding an adapter and holding its files
PARTIAL, LOCK_FILE = "partial", "lock"  # beside the keys; no key is written so
ROOM = "room"  # nor so


class Entry(msgspec.Struct, frozen=True):
    name: str  # what a request calls it; "" = none can, as of a merge
    version: str
    stamp: str  # of the source, when it was read
    is_private: bool
    merge: AdapterRef | None = None  # what it was made of, and is called, if it was not downloaded


Stamp = tuple[int, int]  # inode, nanoseconds since 1970


@dataclass(frozen=True, slots=True)
class _Held:
    path: Path
    num_bytes: int
    last_used: float  # seconds since 1970


class DiskCache:
    def __init__(self, folder: Path, max_bytes: int) -> None:
        self._folder = folder
        self._partial = folder / PARTIAL
        self._locks = NodeLocks(folder / LOCK_FILE)
        self._is_clean = False
        self._cleaning = threading.Lock()
        self._entries: dict[str, tuple[Stamp, Entry]] = {}  # by key, what was read with that stamp; any thread may put and pop
        self._room = DiskRoom(max_bytes)
        self.uses = TierUses()  # by key, of this process

    @property
    def max_bytes(self) -> int:
        return self._room.max_bytes

    def entry(self, key: str) -> Entry | None:
        file = f"{self._folder}/{key}/{ENTRY_FILE}"
        try:
            stamp = _stamp(file)
            known = self._entries.get(key)
            if known and known[0] == stamp:
                return known[1]
            entry = msgspec.json.decode(Path(file).read_bytes(), type=Entry)
        except (OSError, msgspec.MsgspecError):
            self._entries.pop(key, None)
            return None
        if len(self._entries) >= MAX_REMEMBERED:  # most of them are gone by now
            self._entries.clear()
        self._entries[key] = stamp, entry
        return entry

    def entries(self) -> dict[str, Entry]:
        """By key."""
        keys = [file.parent.name for file in self._folder.glob(f"*/{ENTRY_FILE}")]
        return {key: entry for key in keys if (entry := self.entry(key))}

    def stamps(self, max_keys: int) -> dict[str, str]:
        """Of each key's entry, what changes with it; none is read."""
        stamps: dict[str, str] = {}
        with suppress(OSError), os.scandir(self._folder) as keys:
            for key in islice((key for key in keys if key.name not in (PARTIAL, LOCK_FILE)), max_keys):
                with suppress(OSError):  # no key, or removed meanwhile
                    stamps[key.name] = "-".join(map(str, _stamp(f"{key.path}/{ENTRY_FILE}")))
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

    def has(self, key: str) -> bool:
        """The version that its entry names."""
        entry = self.entry(key)
        return entry is not None and self.path(key, entry.version).is_dir()

    def num_bytes(self, key: str) -> int:
        return sum(held.num_bytes for held in self._held(self._folder / key))

    def bytes_at(self, path: str) -> int:
        """0 if it is a folder of others."""
        here = self._held(Path(path).parent) if self._is_here(Path(path)) else []
        return sum(held.num_bytes for held in here if held.path == Path(path))

    def hold(self, path: str) -> None:
        """Its files stay until they are let go. Waits for nobody; folders that are not of this cache need no such thing."""
        if self._is_here(Path(path)):
            self._locks.share(_lock_name(Path(path)))

    def let_go(self, path: str) -> bool:
        """Whether it was removed meanwhile, so that it is to be freed."""
        if not self._is_here(Path(path)):
            return False
        self._locks.unshare(_lock_name(Path(path)))
        self._room.changed()
        return (Path(path) / REMOVED_FILE).exists()

    def free(self, path: str) -> None:
        """Deletes what was removed while somebody held it, unless somebody still does or it was published again."""
        with self.only_one(ROOM):
            if (Path(path) / REMOVED_FILE).exists():
                self._delete(Path(path))

    def disown(self, key: str) -> None:
        """Its version is broken, so it is served no more and in nobody's way."""
        with self.only_one(ROOM):
            (self._folder / key / ENTRY_FILE).unlink(missing_ok=True)

    def only_one(self, key: str) -> AbstractContextManager[None]:
        """Of all processes on this node."""
        return self._locks.only_one(key)

    @contextmanager
    def staging(self, key: str, num_bytes: int = 0) -> Iterator[Path]:
        """A folder to download into, for who is the only one of its key and publishes it; room for num_bytes is made before, or there is
        none. 0: `grow` makes it later."""
        self._clean()
        self._delete_partial(key)  # by a process that died
        folder = self._partial / f"{key}.0"
        folder.mkdir(parents=True)
        started = time.monotonic()
        try:
            yield self.grow(folder, num_bytes) if num_bytes else folder
            self.uses.add(key, TierUse(num_loads=1, load_seconds=time.monotonic() - started))
        finally:
            self._delete_partial(key)

    def grow(self, staged: Path, num_bytes: int, until: float = 0.0) -> Path:
        """Makes room for so many bytes in the staged folder, which has another name then. Waits for it until that moment of the monotonic
        clock: others are read into memory or downloaded, and need theirs no more. Raises DiskFull and DiskBusy."""
        has_waited = False
        while True:
            began = time.monotonic()
            try:
                with self.only_one(ROOM):  # held while files are counted and deleted, never while any are read from afar
                    self._room.check(num_bytes, began, has_waited)
                    self._make_room(num_bytes, staged.stem)
                    return staged.rename(staged.with_suffix(f".{num_bytes}"))
            except DiskBusy:
                if began >= until:
                    raise
            time.sleep(max(0.0, min(self._room.pause_s, until - time.monotonic())))
            has_waited = True

    @contextmanager
    def published(self, key: str, staged: Path, entry: Entry) -> Iterator[Path]:
        """From now on this is the key's version, whose files stay until the end of the block at least."""
        try:
            with self._locks.shared(_lock_name(self.path(key, entry.version))):
                path = self._publish(key, staged, entry)
                self._delete_partial(key)  # it counts no more
                yield path
        finally:
            self._room.changed()  # it may be evicted

    def _publish(self, key: str, staged: Path, entry: Entry) -> Path:
        """Nobody looks into the folder before the entry names it."""
        folder = self.path(key, entry.version)
        stays = is_whole(folder, entry.version)  # who uses it would notice other files, even equal ones
        with self.only_one(ROOM):
            folder.mkdir(parents=True, exist_ok=True)
            for name in () if stays else FILES:
                os.replace(staged / name, folder / name)
            for name in EXTRA_FILES:  # of no version: they change without it
                if (staged / name).exists():
                    os.replace(staged / name, folder / name)
                else:
                    (folder / name).unlink(missing_ok=True)
            (folder / REMOVED_FILE).unlink(missing_ok=True)
            self.touch(folder)
            self.set_entry(key, entry)
            shutil.rmtree(staged, ignore_errors=True)
        return folder

    def remove(self, *keys: str) -> None:
        """Versions that somebody holds stay until they are let go. Takes a moment, in which those who have found one may hold it."""
        there = [key for key in keys if (self._folder / key).is_dir()]
        for key in there:
            with self._locks.if_free(key) as is_free:  # else another process fetches it, or removes it
                if is_free:
                    with self.only_one(ROOM):
                        (self._folder / key / ENTRY_FILE).unlink(missing_ok=True)
        time.sleep(FOUND_S if there else 0.0)
        for key in there:
            with self.only_one(ROOM):
                for held in self._held(self._folder / key) if self.entry(key) is None else ():  # else it was published again meanwhile
                    with suppress(OSError):  # a full disk: it is deleted now or evicted later
                        (held.path / REMOVED_FILE).touch()  # before it is tried: who lets it go later sees this
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

    def _delete_partial(self, key: str) -> None:
        for folder in self._partial.glob(f"{key}.*"):
            shutil.rmtree(folder, ignore_errors=True)
            if folder.suffix != ".0":  # of who has found no room there has been none either
                self._room.changed()

    def _delete_left(self) -> None:
        """What processes that died had not downloaded to the end."""
        for left in self._partial.glob("*.*"):
            with self._locks.if_free(left.name.rpartition(".")[0]) as is_free:
                if is_free:
                    shutil.rmtree(left, ignore_errors=True)

    def _make_room(self, num_bytes: int, key: str) -> None:
        """key: what the room is for. Its version that is served stays, unless the disk could not hold both: that one goes last.
        Raises DiskBusy."""
        began = time.monotonic()
        entry = self.entry(key)
        served = self.path(key, entry.version) if entry else None
        folders = [folder for folder in self._folder.iterdir() if folder != self._partial]
        held = sorted((one for folder in folders for one in self._held(folder)), key=lambda one: (one.path == served, one.last_used))
        self._delete_left()
        coming = sum(int(folder.name.rpartition(".")[2]) for folder in self._partial.glob("*.*"))
        excess = sum(one.num_bytes for one in held) + coming + num_bytes - self.max_bytes
        if excess <= 0:
            return
        are_free = self._locks.are_free([_lock_name(one.path) for one in held])
        idle, stay = ([one for one, is_free in zip(held, are_free, strict=True) if is_free == wanted] for wanted in (True, False))
        num_used = sum(one.num_bytes for one in stay)
        if idle and idle[-1].path == served and idle[-1].num_bytes + num_bytes <= self.max_bytes:
            stay.append(idle.pop())
        for one in idle if excess <= sum(one.num_bytes for one in idle) else ():
            if excess <= 0:
                return
            if not self._delete(one.path):
                stay.append(one)  # somebody holds since what was idle a moment ago
                continue
            self.uses.add(one.path.parent.name, TierUse(num_evictions=1))
            logger.info("evicted %s from the disk cache: %d bytes", one.path.parent.name, one.num_bytes)
            excess -= one.num_bytes
        if excess > 0:
            self._room.looked(began, num_used, coming)
            raise self._room.busy(num_bytes, sum(one.num_bytes for one in stay), coming)

    def _is_here(self, version: Path) -> bool:
        return version.parent.parent == self._folder

    def _delete(self, version: Path) -> bool:
        """Whether nobody held it."""
        with self._locks.if_free(_lock_name(version)) as is_free:
            if is_free:
                entry = self.entry(version.parent.name)
                if entry and entry.version == version.name:
                    (version.parent / ENTRY_FILE).unlink(missing_ok=True)
                shutil.rmtree(version, ignore_errors=True)
        with suppress(OSError):  # it has other versions
            version.parent.rmdir()
        return is_free

    def _clean(self) -> None:
        """Once in a process: removes what a dead process had not downloaded or deleted to the end, so that it does not count."""
        with self._cleaning:
            if self._is_clean:
                return
            self._is_clean = True
            self._delete_left()
            for mark in self._folder.glob(f"*/*/{REMOVED_FILE}"):
                self.free(str(mark.parent))


def _stamp(entry_file: str) -> Stamp:
    found = os.stat(entry_file)
    return found.st_ino, found.st_mtime_ns


def _lock_name(version: Path) -> str:
    return f"{version.parent.name}/{version.name}"


def is_whole(folder: Path, version: str) -> bool:
    try:
        return content_hash(folder) == version
    except OSError:
        return False
