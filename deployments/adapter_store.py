"""The adapter that a reference means, as files on this node: found in a folder, on disk from an earlier download, or downloaded now.

Blocking, and for many threads at once; who waits for a download delays nobody but those who want the same. Knows neither Ray nor tensors.
"""

import contextlib
import logging
import time
from collections.abc import Set
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path

import msgspec
from huggingface_hub import get_token

from loray.deployments.adapter_download import download
from loray.deployments.adapter_errors import only_loray_errors, told_when_full, was_there
from loray.deployments.adapter_files import AdapterFiles
from loray.deployments.adapter_listing import AdapterListing
from loray.deployments.adapter_merging import Merge, check_room, merge_into, merge_place
from loray.deployments.adapter_readers import AdapterReaders
from loray.deployments.adapter_room import ANY_ROOM, AdapterRoom
from loray.deployments.adapter_sources import URL_SCHEMES, Offer, Place, Places, Source, named
from loray.deployments.adapter_status import TierUse
from loray.deployments.adapters import Adapter
from loray.deployments.config import AdapterArgs
from loray.deployments.disk_cache import DiskCache, Entry, is_whole
from loray.deployments.download_wish import Wish
from loray.deployments.errors import AdapterChanged, AdapterFailed, AdapterNotFound, InvalidRequest, LorayError, Overloaded
from loray.deployments.hub_source import HubSource, not_found
from loray.deployments.keyed_lock import KeyedLock
from loray.deployments.remembered_failures import RememberedFailures
from loray.deployments.request import AdapterRef
from loray.deployments.source_origins import source_origins
from loray.deployments.url_source import UrlSource
from loray.models.adapter import Shapes

logger = logging.getLogger("ray.serve.loray")

ROOM_S = 30.0  # that a download waits for room on disk
NUM_READS = 3  # of an adapter that changes at its source while it is read
NOWHERE = "none"  # the key of a reference that means nothing: nothing is kept under it


class AdapterStore:
    """`merge` merges adapters and raises AdapterError; who can sets it."""

    def __init__(self, args: AdapterArgs, lora_shapes: Shapes, cache: Path, room: AdapterRoom = ANY_ROOM) -> None:
        self.merge: Merge
        self._lora_shapes = lora_shapes
        self._places = Places(args.default_source, source_origins(args.storage_options))
        self._max_bytes = int(args.disk_bytes)
        self.max_pinned_bytes = self._max_bytes // 2  # the other half is for what requests name, and for the next version of what is pinned
        self._files = AdapterFiles(args.local_roots, lora_shapes, room)
        self._cache = DiskCache(cache, self._max_bytes)
        urls = UrlSource(args.allowed_urls, args.storage_options)
        self._sources: dict[str, Source] = {"hub": HubSource(), **dict.fromkeys(URL_SCHEMES, urls)}
        self._listing = AdapterListing(self._files, self._cache, self._sources, self._places)
        self._asking, self._fetching = KeyedLock(), KeyedLock()  # by asker; by key
        self._stale: dict[str, int] = {}  # keys whose source is to be asked anew -> number of that wish
        self._numbers = count(1)
        self._unrenewed: dict[str, str] = {}  # key -> why its source could not be asked anew
        self._failures = RememberedFailures()
        self._readers = AdapterReaders()

    def find(self, ref: AdapterRef, asked: float | None = None) -> Adapter:
        """The adapter as it is to be served now. Raises AdapterNotFound, AdapterFailed, InvalidRequest and Overloaded.

        asked: when, by the monotonic clock, if not now; from then on room on disk is waited for."""
        place, room_until = self._places.of(ref), (asked or time.monotonic()) + ROOM_S
        with only_loray_errors(place.name):
            if place.source == "local":
                return self._files.find(place.address)
            adapter = self._find_download(self._wish(ref, place, room_until))
        adapter.adapter_id, adapter.unrenewed = ref.adapter_id, self._unrenewed.get(place.key, "")
        return adapter

    def held_merge(self, ref: AdapterRef, parts: list[Adapter]) -> Adapter | None:
        """Several adapters as one, if that is on disk; the same versions and recipe are the same merge. Who asks may read the parts."""
        place, is_private = merge_place(ref, parts), any(part.is_private for part in parts)
        wish = Wish(place, "", (place.key, b""))
        with only_loray_errors(ref.adapter_id), self._failures.of(wish.asker):
            adapter, entry = self._on_disk(wish), self._cache.entry(place.key)
            if adapter and entry and entry.is_private != is_private:
                self._cache.set_entry(place.key, msgspec.structs.replace(entry, is_private=is_private))
        if adapter:
            adapter.adapter_id = ref.adapter_id
        return adapter

    def check_merge(self, ref: AdapterRef, parts: list[Adapter]) -> None:
        """Raises AdapterFailed if there could never be room for these parts, and what may come of them, side by side."""
        check_room(self._cache, ref, parts)

    def merged(self, ref: AdapterRef, parts: list[Adapter]) -> Adapter:
        """The same, made where it is not on disk, and kept like a download."""
        place = merge_place(ref, parts)
        with only_loray_errors(ref.adapter_id), self._fetching.only_one(place.key), self._cache.only_one(place.key):
            if adapter := self.held_merge(ref, parts):
                return adapter
            self._cache.disown(place.key)
            with self._failures.of((place.key, b"")), told_when_full(ref.adapter_id):
                return merge_into(self._cache, self._files, self.named(ref), parts, self.merge, self._lora_shapes)

    def names(self) -> list[str]:
        """The adapters that are here and that everybody gets by these names alone, as far as they have been looked at."""
        return self._listing.names()

    def num_unlisted(self) -> int:
        """Folders that the last `names` had no time to look at."""
        return self._listing.num_new

    def left_on_disk(self, known: Set[str]) -> list[tuple[AdapterRef, Adapter]]:
        """Downloads and merges of other keys than these: others made them. Nothing but their place and version is looked up."""
        return self._listing.left_on_disk(known)

    def forget(self, ref: AdapterRef) -> None:
        """The next find asks the source; where that fails, what is on disk is served on, unless the source says that it is no more.

        Folders need no such thing: they are always read as they are."""
        key = self.place_key(ref)
        if self._cache.entry(key) or len(self._asking):  # it may be on its way
            self._stale[key] = next(self._numbers)
        self._failures.forget(key)

    def remove(self, ref: AdapterRef, path: str = "") -> None:
        """Deletes its download; what is held is for `free`. The configured roots are left alone. path: of one merge; else all of a name."""
        self.forget(ref)
        key = self.place_key(ref)
        self._readers.forget(key)
        for asker in (asker for asker in self._asking.in_use() if asker.startswith(f"{key} ")):
            with self._asking.only_one(asker):  # what comes now goes too
                pass
        with self._fetching.only_one(key):
            self._cache.remove(*([self.place_key(ref, path)] if path else [key, *self._listing.merges(ref.adapter_id)]))
        self._stale.pop(key, None)
        self._unrenewed.pop(key, None)

    def hold(self, path: str) -> None:
        """The files in this folder stay on disk until they are let go. Never blocks."""
        self._cache.hold(path)

    def let_go(self, path: str) -> bool:
        """Whether it is to be freed, since it was removed meanwhile. Never blocks."""
        return self._cache.let_go(path)

    def free(self, path: str) -> None:
        """Deletes a folder that was removed while it was held."""
        self._cache.free(path)

    def is_local(self, ref: AdapterRef) -> bool:
        return self._places.of(ref).source == "local"

    def named(self, ref: AdapterRef) -> AdapterRef:
        """The reference without its token, and written in one way only."""
        return msgspec.structs.replace(ref, api_token="") if ref.merge else named(ref, self._places.default_source)

    def is_on_disk(self, ref: AdapterRef) -> bool:
        """In the version that is to be served."""
        return self._cache.has(self.place_key(ref))

    def disk_bytes(self, ref: AdapterRef, path: str = "") -> int:
        return self._cache.num_bytes(self.place_key(ref, path))

    def folder_bytes(self, path: str) -> int:
        """That the disk tier has in this folder; 0 for one of others."""
        return self._cache.bytes_at(path)

    def disk_use(self, ref: AdapterRef, path: str = "") -> TierUse:
        return self._cache.uses.of(self.place_key(ref, path))

    def total_disk_use(self) -> TierUse:
        return self._cache.uses.total

    def is_private(self, ref: AdapterRef) -> bool:
        """Whether it is here and not for everybody."""
        entry = self._cache.entry(self.place_key(ref))
        return entry is not None and entry.is_private

    def is_proven(self, ref: AdapterRef) -> bool:
        """Whether its token could read it a while ago."""
        if not ref.api_token or ref.merge:
            return False
        try:
            return self._readers.could_read(self._wish(ref, self._places.of(ref)).asker)
        except InvalidRequest:
            return False

    def is_stale(self, ref: AdapterRef) -> bool:
        """Whether the next find asks its source anew."""
        return self.place_key(ref) in self._stale

    def place_key(self, ref: AdapterRef, path: str = "") -> str:
        """Of the folder of its download; the same for all ways to write the place."""
        if ref.merge and path:
            return Path(path).parent.name
        try:
            return self._places.of(ref).key
        except InvalidRequest:
            return NOWHERE

    def _wish(self, ref: AdapterRef, place: Place, room_until: float = 0.0) -> Wish:
        """The token is the request's own, else the server's; the storage behind a URL has none."""
        token = (ref.api_token or get_token() or "") if place.source == "hub" else ""
        return Wish(place, token, self._readers.asker(place.key, token), room_until)

    def _find_download(self, wish: Wish) -> Adapter:
        place = wish.place
        self._sources[place.source].check(place)
        with self._failures.of(wish.asker):
            if adapter := self._held(wish):
                return adapter
            with self._asking.only_one(f"{place.key} {wish.asker[1].hex()}"), self._failures.of(wish.asker):
                return self._held(wish) or self._ask(wish)

    def _ask(self, wish: Wish) -> Adapter:
        """What its source has, or what is on disk where the source does not answer."""
        key = wish.place.key
        wished, known = self._stale.get(key, 0), self._cache.entry(key)
        try:
            adapter = self._read(wish)
            self._unrenewed.pop(key, None)
        except AdapterNotFound:
            if wish.token:  # a hub refuses one that it does not know also what everybody may read
                return self._ask(replace(wish, token=""))
            if wished and known and not known.is_private:
                self._withdraw(key, known)
            raise
        except (AdapterFailed, Overloaded) as error:
            if not wished or not (held := self._still_held(wish, error)):
                raise
            adapter = held
        if self._stale.get(key) == wished:  # else somebody means a later answer
            self._stale.pop(key, None)
        return adapter

    def _read(self, wish: Wish, num_left: int = NUM_READS) -> Adapter:
        """What its source has, which is asked again where that changes meanwhile."""
        known = self._cache.entry(wish.place.key)
        offer = self._describe(wish)  # before another's download is waited for: who may not read it is told at once
        with was_there():
            try:
                with self._fetching.only_one(wish.place.key):
                    return self._fetch(wish, offer, known)
            except AdapterChanged as change:
                if num_left == 1:
                    raise AdapterFailed(f"{change.message}, {NUM_READS} times; try again later") from None
            return self._read(wish, num_left - 1)

    def _may_read(self, wish: Wish) -> bool:
        if self._readers.may_read(wish.asker):
            return True
        source, place = self._sources[wish.place.source], wish.place
        if may_read := source.may_read(place, wish.token) or (wish.token != "" and source.may_read(place, "")):
            self._readers.add(wish.asker)
        return may_read

    def _held(self, wish: Wish) -> Adapter | None:
        """From disk, if it is there, whole, for this token, and nobody has asked to forget it."""
        return None if wish.place.key in self._stale else self._on_disk(wish)

    def _on_disk(self, wish: Wish) -> Adapter | None:
        place, entry = wish.place, self._cache.entry(wish.place.key)
        if entry is None:
            return None
        if entry.is_private and not entry.merge and not self._may_read(wish):
            raise not_found(place)
        path = self._cache.path(place.key, entry.version)
        try:
            adapter = self._files.check(place.name, path)
        except AdapterFailed:
            if is_whole(path, entry.version):  # of another base model
                raise
            adapter = None
        if adapter is None or adapter.version != entry.version:
            logger.warning("adapter %s: its files on disk are broken; fetching it anew", place.name)
            return None
        self._cache.touch(path)
        adapter.is_private = entry.is_private
        return adapter

    def _describe(self, wish: Wish) -> Offer:
        key = wish.place.key
        with self._failures.of_source(key):
            offer = self._sources[wish.place.source].describe(wish.place, wish.token)
        if key in self._stale:
            self._readers.ask_anew(key)
        if offer.is_private:
            self._readers.add(wish.asker)
        return offer

    def _fetch(self, wish: Wish, offer: Offer, known: Entry | None) -> Adapter:
        """known: what was on disk before its source made the offer."""
        key = wish.place.key
        with self._cache.only_one(key):
            entry = self._cache.entry(key)
            if entry and offer.is_private and not entry.is_private:  # whatever becomes of the download
                self._cache.set_entry(key, msgspec.structs.replace(entry, is_private=True))
            if entry and entry != known and entry.is_private != offer.is_private:  # which of both its source has said last nobody knows
                raise AdapterChanged(f"adapter {wish.place.name!r}: who may read it was changed while it was read")
            if adapter := self._held(wish) or self._unchanged(wish, offer):
                return adapter
            if entry and not is_whole(self._cache.path(key, entry.version), entry.version):
                self._cache.disown(key)
            return self._download(wish, offer)

    def _still_held(self, wish: Wish, error: LorayError) -> Adapter | None:
        """What is on disk, when its source could not be asked anew: it was good until now."""
        with contextlib.suppress(LorayError):
            if adapter := self._on_disk(wish):
                self._unrenewed[wish.place.key] = error.message
                logger.warning("%s; what is on disk is served on", error.message)
                return adapter
        return None

    def _withdraw(self, key: str, known: Entry) -> None:
        """What everybody could have is for nobody without a token any more: no other process is to serve or list it either."""
        self._stale[key] = next(self._numbers)  # what is on its way may have been offered before
        with self._fetching.only_one(key):
            if self._cache.entry(key) == known:
                self._cache.remove(key)

    def _unchanged(self, wish: Wish, offer: Offer) -> Adapter | None:
        """What is on disk, if it is what the source has: another process may have fetched it meanwhile."""
        key = wish.place.key
        entry = self._cache.entry(key)
        if entry is None or not offer.stamp or entry.stamp != offer.stamp:
            return None
        adapter = self._on_disk(wish)
        if adapter and entry.is_private != offer.is_private:
            self._cache.set_entry(key, msgspec.structs.replace(entry, is_private=offer.is_private))
            adapter.is_private = offer.is_private
        return adapter

    def _download(self, wish: Wish, offer: Offer) -> Adapter:
        place = wish.place
        if offer.num_bytes > self._max_bytes:
            raise AdapterFailed(f"adapter {place.name!r}: {offer.num_bytes} bytes are more than disk_bytes ({self._max_bytes})")
        may_wait = offer.num_bytes <= self._max_bytes - self.max_pinned_bytes  # else pins may keep it out for ever
        is_here = place.key in self._stale and self._cache.entry(place.key) is not None  # and is served on instead
        room_until = wish.room_until if may_wait and not is_here else 0.0
        fetch = partial(download, self._sources[place.source], place, offer, self._files, self._cache, room_until)
        with told_when_full(place.name), self._failures.of_source(place.key):
            try:
                return fetch(wish.token)
            except AdapterNotFound:
                if offer.is_private or not wish.token:
                    raise
                return fetch("")  # a token that is refused keeps from nobody what all may read
