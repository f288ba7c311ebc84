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

    def left_over(self, key: AdapterRef, last_began: int) -> AdapterRecord | None:
        """The unload that an admin wanted last of it, if all who have asked for it had begun before. Of a merge: by its name."""
        record = self.records.get(key.adapter_id)
        is_meant = record and (key.merge is not None or self._written(record.ref) == key)
        return record if record and is_meant and not record.is_loaded and last_began < record.number else None

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
