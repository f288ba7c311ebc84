"""What admins want of adapters: a record for each adapter that one of them loaded, pinned, reloaded or unloaded. Pure state."""

import time

import msgspec

from loray.deployments.adapter_status import AdminAction
from loray.deployments.request import AdapterRef

MAX_UNLOADED = 1000  # records of unloaded adapters that are kept
MAX_UNDONE = 1000  # changes that are remembered as undone: more can't be on their way at once


def now_ms() -> int:
    """Since 1970, as records are numbered."""
    return time.time_ns() // 1_000_000


class AdapterRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What an admin last wanted of an adapter.

    A replica acts on a record whose number is new to it: unload it, or have it in host memory, looking it up again if the
    generation is newer too. An adapter without a record is one that no admin wants anything of: not pinned."""

    ref: AdapterRef
    is_loaded: bool  # False: unloaded, until somebody asks for it again
    is_pinned: bool
    generation: int  # number of the change since which its files count, 0 = whatever is here counts
    number: int  # of its last change
    change: int = 0  # number of the admin's change that it comes from: an undo brings it back under a new number


class AdapterRecords(msgspec.Struct, frozen=True):
    """The whole set."""

    number: int = 0  # grows with every change
    records: list[AdapterRecord] = []


class AdapterChange(msgspec.Struct, frozen=True, kw_only=True):
    """What an admin asks for. `ref` counts for load; else only where there is no record yet."""

    action: AdminAction
    ref: AdapterRef
    is_pinned: bool = False  # of load: pin it too


class Changed(msgspec.Struct, frozen=True):
    record: AdapterRecord
    previous: AdapterRecord | None


class AdapterSet:
    """The records. Numbers are milliseconds since 1970 or a little more, so that of two registries the later one's are larger."""

    def __init__(self) -> None:
        self.number = 0
        self._records: dict[str, AdapterRecord] = {}  # by adapter id, the last changed last
        self._undone: dict[int, AdapterRecord | None] = {}  # number of a change that was undone -> what was there before it

    def snapshot(self) -> AdapterRecords:
        return AdapterRecords(self.number, list(self._records.values()))

    def change(self, change: AdapterChange) -> Changed:
        adapter_id = change.ref.adapter_id
        previous = self._records.get(adapter_id)
        known = previous if previous and previous.is_loaded else None
        if change.action == "unpin" and not (known and known.is_pinned):  # nothing is to be done
            nothing = AdapterRecord(ref=change.ref, is_loaded=False, is_pinned=False, generation=0, number=self.number)
            return Changed(known or nothing, previous)
        ref = known.ref if known and change.action != "load" else change.ref
        if change.action == "unload":
            ref = msgspec.structs.replace(ref, api_token="")
        number = self._next()
        is_same = known and known.ref == ref and change.action not in ("reload", "unload")
        looks_again = change.action not in ("pin", "unpin")
        record = AdapterRecord(
            ref=ref,
            is_loaded=change.action != "unload",
            is_pinned=_is_pinned(change, bool(known and known.is_pinned)),
            generation=known.generation if known and is_same else number * looks_again,
            number=number,
            change=number,
        )
        self._put(adapter_id, record)
        return Changed(record, previous)

    def undo(self, changed: Changed) -> None:
        """If the adapter was changed again since, nothing is, but no later undo brings this change back."""
        adapter_id, previous = changed.record.ref.adapter_id, changed.previous
        if changed.record is previous or changed.record == previous:  # it changed nothing
            return
        self._undone[changed.record.change] = previous
        for oldest in list(self._undone)[:-MAX_UNDONE]:
            del self._undone[oldest]
        current = self._records.get(adapter_id)
        if current is None or current.change != changed.record.change:
            return
        while previous and previous.change in self._undone:
            previous = self._undone[previous.change]
        number = self._next()
        if previous and previous.is_loaded:
            self._put(adapter_id, msgspec.structs.replace(previous, number=number))
        else:
            del self._records[adapter_id]

    def is_overtaken(self, record: AdapterRecord) -> bool:
        """Whether the adapter was unloaded since."""
        newest = self._records.get(record.ref.adapter_id)
        return newest is not None and not newest.is_loaded

    def merge(self, other: AdapterRecords) -> None:
        """Of each adapter the later record counts."""
        self.number = max(self.number, other.number)
        newer = [record for record in other.records if record.number > self._number_of(record.ref.adapter_id)]
        for record in newer:
            self._put(record.ref.adapter_id, record)
        if newer:
            self.number = self._next()

    def _number_of(self, adapter_id: str) -> int:
        return self._records[adapter_id].number if adapter_id in self._records else -1

    def _next(self) -> int:
        self.number = max(self.number + 1, now_ms())
        return self.number

    def _put(self, adapter_id: str, record: AdapterRecord) -> None:
        self._records.pop(adapter_id, None)
        self._records[adapter_id] = record
        unloaded = [known for known, record in self._records.items() if not record.is_loaded]
        for known in unloaded[:-MAX_UNLOADED]:
            del self._records[known]


def _is_pinned(change: AdapterChange, was_pinned: bool) -> bool:
    if change.action in ("pin", "unpin"):
        return change.action == "pin"
    return change.action != "unload" and (was_pinned or change.is_pinned)
