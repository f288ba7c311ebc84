"""The one owner of what admins want of adapters. Tells every driver replica, and knows which of them have acted on it.

Knows neither Ray nor files. Its state is in memory alone, since records may hold tokens: when it is built anew, the driver replicas,
which all have the whole set, bring it back.
"""

import asyncio
import contextlib
import time
import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from loray.deployments.adapter_records import AdapterChange, AdapterRecord, AdapterRecords, AdapterSet, Changed, now_ms
from loray.deployments.adapter_status import AdapterStatus
from loray.deployments.errors import Unhealthy

TICK_S = 0.25  # how often silence is noticed
NO_REPLICA = "no driver replica is there yet; try again"


class Poll(msgspec.Struct, frozen=True, kw_only=True):
    """A replica says what it knows, and waits for more."""

    replica_id: str
    epoch: str = ""  # of the registry it knows; "" = none yet
    number: int = 0  # of the newest set it has
    applied: int = 0  # number of the set it has acted on
    error: str = ""  # why it could not
    question: int = 0  # the last it was asked


class News(msgspec.Struct, frozen=True, kw_only=True):
    epoch: str
    question: int = 0  # newer than the replica's: report your statuses
    records: AdapterRecords | None = None  # None = nothing new
    wants_records: bool = False  # the registry is new and asks the replica for the set
    is_over: bool = False  # the application is being deleted, and nobody is to bring its set to the next by its name


class Report(msgspec.Struct, frozen=True, kw_only=True):
    replica_id: str
    applied: int
    error: str
    question: int
    statuses: list[AdapterStatus]


@dataclass(frozen=True, slots=True)
class Patience:
    """Seconds. A replica that died in its poll is found out before a change gives up on it: gone_s < apply_s."""

    poll_s: float = 5.0  # a poll without news
    gone_s: float = 5.0  # between two polls of a replica that lives
    apply_s: float = 10.0
    answer_s: float = 3.0


@dataclass(slots=True)
class _Replica:
    applied: int = 0
    error: str = ""
    question: int = 0
    statuses: list[AdapterStatus] = field(default_factory=list)
    num_polls: int = 0  # that wait now
    last_seen: float = 0.0

    def note(self, applied: int, error: str) -> None:
        """Polls and reports may overtake each other."""
        if applied >= self.applied:
            self.applied, self.error = applied, error


class Registry(Protocol):
    """The way to it from another process."""

    async def ask(self, method: str, *messages: bytes) -> bytes: ...


class AdapterRegistry:
    """One for an application. Arguments and answers are msgpack of the structs above."""

    def __init__(self, patience: Patience | None = None) -> None:
        self._patience = patience or Patience()
        self._epoch = uuid.uuid4().hex
        self.is_over = False  # set from any thread
        self._set = AdapterSet()
        self._replicas: dict[str, _Replica] = {}
        self._question = now_ms()  # beyond all of an earlier registry, whose answers may come late
        self._news = asyncio.Event()  # set and replaced when anything happens

    # For driver replicas: registry_follower.py.

    async def changes(self, poll: bytes) -> bytes:
        """News, once there are newer ones than the replica's; after a while, that there are none."""
        asked = msgspec.msgpack.decode(poll, type=Poll)
        if self.is_over:
            return msgspec.msgpack.encode(News(epoch=self._epoch, is_over=True))
        if asked.epoch not in ("", self._epoch):
            return msgspec.msgpack.encode(News(epoch=self._epoch, wants_records=True))
        replica = self._replicas.setdefault(asked.replica_id, _Replica())
        replica.note(asked.applied, asked.error)
        replica.num_polls += 1
        self._tell()
        try:
            await self._until(
                lambda: self.is_over or self._set.number > asked.number or self._question > asked.question, self._patience.poll_s
            )
        finally:
            replica.num_polls -= 1
            replica.last_seen = time.monotonic()
        records = self._set.snapshot() if self._set.number > asked.number else None
        return msgspec.msgpack.encode(News(epoch=self._epoch, question=self._question, records=records, is_over=self.is_over))

    async def report(self, report: bytes) -> None:
        said = msgspec.msgpack.decode(report, type=Report)
        replica = self._replicas.get(said.replica_id)
        if replica:
            replica.note(said.applied, said.error)
            if said.question >= replica.question:
                replica.question, replica.statuses = said.question, said.statuses
            self._tell()

    async def restore(self, records: bytes) -> None:
        self._set.merge(msgspec.msgpack.decode(records, type=AdapterRecords))
        self._tell()

    # For ingress.

    async def change(self, change: bytes) -> bytes:
        """Returns a Changed when every live replica has acted on it."""
        await self._wait_for_followers()
        changed = self._set.change(msgspec.msgpack.decode(change, type=AdapterChange))
        self._tell()
        number = changed.record.number
        await self._until(lambda: all(replica.applied >= number for replica in self._live().values()), self._patience.apply_s)
        late = [replica_id for replica_id, replica in self._live().items() if replica.applied < number]
        if late:
            waited = f"{self._patience.apply_s:.0f} s"
            raise Unhealthy(f"not done by driver replica {', '.join(late)} within {waited}; it is recorded, and done when that can be")
        for replica_id, replica in self._live().items():
            if replica.error:
                raise Unhealthy(
                    f"driver replica {replica_id} could not do it: {replica.error}; it is recorded, and tried again with the next change"
                )
        try:
            await self._wait_for_followers()  # else none that has acted on it has lived to tell
        except Unhealthy:
            self._undo(changed)
            raise
        return msgspec.msgpack.encode(changed)

    async def undo(self, changed: bytes) -> None:
        self._undo(msgspec.msgpack.decode(changed, type=Changed))

    async def is_overtaken(self, record: bytes) -> bytes:
        """bool: AdapterSet.is_overtaken"""
        return msgspec.msgpack.encode(self._set.is_overtaken(msgspec.msgpack.decode(record, type=AdapterRecord)))

    async def statuses(self) -> bytes:
        """dict[replica id, list[AdapterStatus]] of this moment; of a replica that is slow to answer, its last report."""
        await self._wait_for_followers()
        self._question += 1
        question = self._question
        self._tell()
        await self._until(lambda: all(self._answers(question)), self._patience.answer_s)
        if not any(self._answers(question)):  # all are slow, or dead, which is found out by then
            patience_s = self._patience.poll_s + self._patience.gone_s
            await self._until(lambda: not self._live() or any(self._answers(question)), patience_s)
        live = self._live()
        if not any(replica.question for replica in live.values()):  # which is not to know of no adapters
            raise Unhealthy(NO_REPLICA)
        return msgspec.msgpack.encode({replica_id: replica.statuses for replica_id, replica in live.items()})

    def _answers(self, question: int) -> list[bool]:
        return [replica.question >= question for replica in self._live().values()]

    def _undo(self, changed: Changed) -> None:
        self._set.undo(changed)
        self._tell()

    async def _wait_for_followers(self) -> None:
        """Those of a registry that was built anew come back within moments."""
        await self._until(lambda: bool(self._live()), self._patience.answer_s)
        if not self._live():
            raise Unhealthy(NO_REPLICA)

    def _live(self) -> dict[str, _Replica]:
        now = time.monotonic()
        for replica_id, replica in list(self._replicas.items()):
            if not replica.num_polls and now - replica.last_seen > self._patience.gone_s:
                del self._replicas[replica_id]
        return self._replicas

    def _tell(self) -> None:
        self._news.set()
        self._news = asyncio.Event()

    async def _until(self, claim: Callable[[], bool], timeout_s: float) -> None:
        """Also after the time is up: the caller looks."""
        deadline = time.monotonic() + timeout_s
        while not claim() and (left := deadline - time.monotonic()) > 0:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(left, TICK_S)):
                    await self._news.wait()


BEST_FIRST = ("gpu", "host", "loading", "known", "unloading", "failed")


def merge_replicas(statuses: Iterable[AdapterStatus]) -> list[AdapterStatus]:
    """One status for each version, of all replicas together: requests summed, bytes of the replica with most, the best state."""
    versions: dict[tuple[str, ...], AdapterStatus] = {}
    for status in statuses:
        key = (status.adapter_id, status.source, status.revision, status.version)
        versions[key] = _together(versions[key], status) if key in versions else status
    return [versions[key] for key in sorted(versions)]


def _together(one: AdapterStatus, other: AdapterStatus) -> AdapterStatus:
    return msgspec.structs.replace(
        one,
        state=min(one.state, other.state, key=BEST_FIRST.index),
        rank=max(one.rank, other.rank),
        is_pinned=one.is_pinned or other.is_pinned,
        is_private=one.is_private or other.is_private,
        gpu_bytes=max(one.gpu_bytes, other.gpu_bytes),
        host_bytes=max(one.host_bytes, other.host_bytes),
        disk_bytes=max(one.disk_bytes, other.disk_bytes),
        num_running=one.num_running + other.num_running,
        num_served=one.num_served + other.num_served,
        num_failed=one.num_failed + other.num_failed,
        last_used=max(one.last_used, other.last_used),
        gpu_use=one.gpu_use + other.gpu_use,
        host_use=one.host_use + other.host_use,
        disk_use=one.disk_use + other.disk_use,
        error=one.error or other.error,
        last_failure=one.last_failure or other.last_failure,
    )
