"""Which adapters are listed: for everybody those that all get by their name alone and that fit the base model, and for admins what is on
disk. Blocking; loads nothing.

Servers with other models, other default sources, other storages and other lists of URLs share the disk.
"""

import threading
import time
from collections.abc import Mapping, Set
from contextlib import suppress
from typing import NamedTuple

from loray.deployments.adapter_files import AdapterFiles
from loray.deployments.adapter_sources import Place, Places, Source, named
from loray.deployments.adapters import Adapter
from loray.deployments.disk_cache import DiskCache
from loray.deployments.errors import LorayError
from loray.deployments.request import MERGE_OF, AdapterRef

LOOK_S = 0.1  # of a processor, for what is new to one question
DISK_S = 0.5  # likewise, and waiting for the disk counts
MAX_FOLDERS = 20_000  # that a question looks at in one place: about 10 µs each, where they are known


class _Candidate(NamedTuple):
    is_local: bool
    name: str  # of a folder, or the key of a download
    stamp: str  # changes with its files, or with its entry


class AdapterListing:
    """Any thread may ask."""

    def __init__(self, files: AdapterFiles, cache: DiskCache, sources: Mapping[str, Source], places: Places) -> None:
        self._files = files
        self._cache = cache
        self._sources = sources
        self._places = places
        self._names: dict[_Candidate, str] = {}  # "" = not to be listed
        self._lock = threading.Lock()  # held while files are read: many who ask at once would all read the same
        self._answer: list[str] = []  # the last
        self.num_new = 0  # that the last question had no time for

    def names(self) -> list[str]:
        """What is new and there is no time for now is left to later questions: nothing is listed before it is known to fit."""
        if self._lock.acquire(timeout=2 * DISK_S):
            try:
                self._answer = self._look()
            finally:
                self._lock.release()
        return self._answer

    def left_on_disk(self, known: Set[str]) -> list[tuple[AdapterRef, Adapter]]:
        """Downloads and merges of other keys than these. Nothing but their place and version is looked up."""
        left = []
        for key, entry in self._cache.entries().items():
            ref = entry.merge or AdapterRef(adapter_id=entry.name, source="" if "://" in entry.name else "hub")
            path = str(self._cache.path(key, entry.version))
            if key not in known:
                with suppress(LorayError):  # a name that no request can use
                    if ref.merge or self._places.of(ref).key == key:  # else it is from the storage of a server that was set up otherwise
                        as_told = ref if ref.merge else named(ref, self._places.default_source)
                        left.append((as_told, Adapter(ref.adapter_id, entry.version, path, num_pages=0, is_private=entry.is_private)))
        return left

    def merges(self, name: str) -> list[str]:
        """The keys of those that are called so. A name that no merge has costs nothing."""
        entries = self._cache.entries() if name.startswith(MERGE_OF) else {}
        return [key for key, entry in entries.items() if entry.merge and entry.merge.adapter_id == name]

    def _look(self) -> list[str]:
        candidates = self._candidates()
        self._names = {candidate: self._names[candidate] for candidate in candidates if candidate in self._names}
        end, disk_end = time.thread_time() + LOOK_S, time.monotonic() + DISK_S
        for candidate in candidates:
            if candidate not in self._names:
                self._names[candidate] = self._name(candidate)
                if time.thread_time() >= end or time.monotonic() >= disk_end:
                    break
        self.num_new = len(candidates) - len(self._names)
        return sorted({name for name in self._names.values() if name})

    def _candidates(self) -> list[_Candidate]:
        folders = self._files.stamps(MAX_FOLDERS) if self._places.default_source == "local" else {}  # else no name alone leads there
        downloads = self._cache.stamps(MAX_FOLDERS)
        return [_Candidate(True, *folder) for folder in folders.items()] + [_Candidate(False, *download) for download in downloads.items()]

    def _name(self, candidate: _Candidate) -> str:
        try:
            return self._folder_name(candidate.name) if candidate.is_local else self._download_name(candidate.name)
        except LorayError:  # a name that no request can use, or a URL that this server doesn't read from
            return ""

    def _folder_name(self, name: str) -> str:
        return name if self._files.fits(self._files.locate(self._place(name).address)) else ""

    def _download_name(self, key: str) -> str:
        entry = self._cache.entry(key)
        if entry is None or entry.is_private:
            return ""
        place = self._place(entry.name)
        if place.key != key:
            return ""
        self._sources[place.source].check(place)
        return entry.name if self._files.fits(self._cache.path(key, entry.version)) else ""

    def _place(self, name: str) -> Place:
        return self._places.of(AdapterRef(adapter_id=name))
