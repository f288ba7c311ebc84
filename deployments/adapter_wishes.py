"""What admins want of adapters, as far as this replica has heard. Two ids may mean the same files; what one is wanted for holds for both.

Belongs to the driver's event loop. Loads and unloads nothing.
"""

from collections.abc import Callable, Collection, Mapping

from loray.deployments.adapter_records import AdapterRecord
from loray.deployments.adapter_use import AdapterUse
from loray.deployments.request import AdapterRef


class AdapterWishes:
    """written: a reference written in one way; place: where its download lies."""

    def __init__(self, written: Callable[[AdapterRef], AdapterRef], place: Callable[[AdapterRef], str]) -> None:
        self.records: dict[str, AdapterRecord] = {}  # by adapter id
        self._written = written
        self._place = place

    def of(self, use: AdapterUse) -> AdapterRecord | None:
        record = self.records.get(use.ref.adapter_id)
        return record if record and self._written(record.ref) == use.ref else None

    def still_count(self, record: AdapterRecord) -> bool:
        """Whether it is to be loaded, as this record says."""
        newest = self.records.get(record.ref.adapter_id)
        is_same = newest and self._written(newest.ref) == self._written(record.ref) and newest.is_pinned == record.is_pinned
        return bool(newest and is_same and newest.is_loaded)

    def is_meant(self, key: AdapterRef, ref: AdapterRef) -> bool:
        """By an unload of `ref`. Of a merge: all that go by its name."""
        return key == self._written(ref) or (key.merge is not None and key.adapter_id == ref.adapter_id)

    def is_left_over(self, use: AdapterUse) -> bool:
        """Unloaded, and all its requests, which have ended here, had begun before: they came from a replica that was lost."""
        record = self.of(use)
        return record is not None and not record.is_loaded and use.last_began < record.number and not use.num_running

    def versions(self, uses: Mapping[AdapterRef, AdapterUse], leaving: Collection[AdapterRef] = ()) -> dict[str, bool]:
        """Those that are to be loaded by other ids than the leaving ones -> whether they are to be pinned."""
        versions: dict[str, bool] = {}
        for record in self.records.values():
            ref = self._written(record.ref)
            version = uses[ref].version if ref in uses and ref not in leaving else ""
            if record.is_loaded and version:
                versions[version] = versions.get(version, False) or record.is_pinned
        return versions

    def is_place_wanted(self, leaving: AdapterRef) -> bool:
        """Whether another id than this one, of the same download, is to be loaded."""
        leaving, place = self._written(leaving), self._place(leaving)
        others = (record for record in self.records.values() if record.is_loaded and self._written(record.ref) != leaving)
        return any(self._place(record.ref) == place for record in others)
