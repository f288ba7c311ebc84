"""The registry and its followers together, in one event loop; only the way between them is played."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from loray.deployments import adapter_records, registry_follower
from loray.deployments.adapter_records import AdapterChange, AdapterRecords, AdapterSet, Changed
from loray.deployments.adapter_registry import AdapterRegistry, News, Patience, Poll, Report, _Replica, merge_replicas
from loray.deployments.adapter_status import AdapterStatus, TierUse
from loray.deployments.errors import Unhealthy
from loray.deployments.registry_follower import RegistryFollower
from loray.deployments.request import AdapterRef
from tests.deployments.scripted_backend import run, status_of

pytestmark = pytest.mark.slow  # waits

QUICK = Patience(poll_s=0.3, gone_s=0.3, apply_s=0.8, answer_s=0.6)


def change(action: Any, adapter_id: str = "pirate", is_pinned: bool = False, **ref: str) -> AdapterChange:
    return AdapterChange(action=action, ref=AdapterRef(adapter_id=adapter_id, **ref), is_pinned=is_pinned)


class Handle:
    """The way to the registry, which can be lost and built anew."""

    def __init__(self, patience: Patience = QUICK) -> None:
        self.patience = patience
        self.registry = AdapterRegistry(patience)

    def rebuild(self) -> None:
        self.registry = AdapterRegistry(self.patience)

    async def ask(self, method: str, *messages: bytes) -> bytes:
        registry = self.registry
        answer: bytes = await getattr(registry, method)(*messages)
        if registry is not self.registry:
            raise ConnectionError("the registry died")
        return answer


class Replica:
    def __init__(self, handle: Handle, replica_id: str) -> None:
        self.applied: list[AdapterRecords] = []
        self.statuses: list[AdapterStatus] = []
        self.can_apply = asyncio.Event()
        self.can_apply.set()
        self.can_tell = asyncio.Event()
        self.can_tell.set()
        self.failure: Exception | None = None
        self.follower = RegistryFollower(handle, replica_id, self._apply, self._statuses)
        self.task = asyncio.create_task(self.follower.run())

    async def _apply(self, records: bytes) -> None:
        await self.can_apply.wait()
        if self.failure:
            raise self.failure
        self.applied.append(msgspec.msgpack.decode(records, type=AdapterRecords))

    async def _statuses(self) -> list[AdapterStatus]:
        await self.can_tell.wait()
        return self.statuses

    def loaded(self) -> list[str]:
        return sorted(record.ref.adapter_id for record in self.applied[-1].records if record.is_loaded) if self.applied else []


@contextlib.asynccontextmanager
async def replicas(handle: Handle, *replica_ids: str) -> AsyncIterator[list[Replica]]:
    all_replicas = [Replica(handle, replica_id) for replica_id in replica_ids]
    await until(lambda: handle.registry._live().keys() >= set(replica_ids))
    try:
        yield all_replicas
    finally:
        for replica in all_replicas:
            replica.task.cancel()
        await asyncio.gather(*(replica.task for replica in all_replicas), return_exceptions=True)


async def until(claim: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not claim():
            await asyncio.sleep(0.01)


async def tell(handle: Handle, wanted: AdapterChange) -> Changed:
    return msgspec.msgpack.decode(await handle.registry.change(msgspec.msgpack.encode(wanted)), type=Changed)


async def ask(handle: Handle) -> dict[str, list[AdapterStatus]]:
    return msgspec.msgpack.decode(await handle.registry.statuses(), type=dict[str, list[AdapterStatus]])


@pytest.fixture(autouse=True)
def quick_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry_follower, "RETRY_S", 0.01)


@pytest.mark.parametrize("num_ticks", range(6))
def test_a_follower_that_is_cancelled_when_an_answer_comes_ends(num_ticks: int) -> None:
    async def work() -> None:
        polls: list[asyncio.Future[bytes]] = []

        def ask(method: str, poll: bytes) -> asyncio.Future[bytes]:
            polls.append(asyncio.get_running_loop().create_future())
            return polls[-1]

        task = asyncio.create_task(RegistryFollower(SimpleNamespace(ask=ask), "r", no_records, no_statuses).run())  # type: ignore[arg-type]
        await until(lambda: bool(polls))
        polls[0].set_result(msgspec.msgpack.encode(News(epoch="one")))
        for _ in range(num_ticks):
            await asyncio.sleep(0)
        task.cancel()
        assert await asyncio.wait([task], timeout=5) == ({task}, set())

    run(work())


async def no_records(records: bytes) -> None:
    pass


async def no_statuses() -> list[AdapterStatus]:
    return []


# --- the set


def test_loading_again_keeps_the_generation_and_reloading_makes_a_new_one() -> None:
    records = AdapterSet()
    first = records.change(change("load")).record
    again = records.change(change("load", is_pinned=True)).record
    reloaded = records.change(change("reload")).record
    other = records.change(change("load", revision="v2")).record
    assert first.generation == again.generation < reloaded.generation < other.generation
    assert [again.is_pinned, reloaded.is_pinned, other.is_pinned] == [True, True, True], "only unpin and unload unpin"
    assert first.number < again.number < reloaded.number < other.number == records.number


def test_pin_and_reload_keep_what_the_load_said_and_unload_forgets_the_token() -> None:
    records = AdapterSet()
    ref = records.change(change("load", source="hub", revision="v2", api_token="secret")).record.ref
    assert records.change(change("pin", source="elsewhere")).record.ref == ref
    assert not records.change(change("unpin")).record.is_pinned
    assert records.change(change("reload")).record.ref == ref
    unloaded = records.change(change("unload")).record
    assert (unloaded.is_loaded, unloaded.is_pinned, unloaded.ref.api_token) == (False, False, "")
    assert records.change(change("load")).record.generation > unloaded.generation


def test_records_of_unloaded_adapters_are_bounded_and_loaded_ones_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter_records, "MAX_UNLOADED", 3)
    records = AdapterSet()
    records.change(change("load", "kept"))
    for number in range(10):
        records.change(change("unload", f"a{number}"))
    assert [record.ref.adapter_id for record in records.snapshot().records] == ["kept", "a7", "a8", "a9"]


def test_undo_brings_back_the_record_before_unless_there_is_a_later_one() -> None:
    records = AdapterSet()
    records.change(change("load", revision="v1"))
    second = records.change(change("load", revision="v2"))
    before = records.number
    records.undo(second)
    (restored,) = records.snapshot().records
    assert restored.ref.revision == "v1" and restored.number == records.number > before
    records.undo(records.change(change("load", "new")))
    assert records.snapshot().records == [restored]


def test_of_two_sets_the_later_record_of_each_adapter_counts() -> None:
    old, new = AdapterSet(), AdapterSet()
    old.change(change("load", "both"))
    old.change(change("load", "old"))
    new.change(change("unload", "elsewhere"))
    new.number = old.number
    new.change(change("unload", "both"))
    before = new.number
    new.merge(old.snapshot())
    records = {record.ref.adapter_id: record.is_loaded for record in new.snapshot().records}
    assert records == {"elsewhere": False, "both": False, "old": True}
    assert new.number > before > old.number, "who has either set gets the merged one"


# --- registry and followers


def test_a_change_returns_when_every_replica_has_applied_it() -> None:
    async def scenario() -> None:
        handle = Handle()
        async with replicas(handle, "a", "b") as (a, b):
            b.can_apply.clear()
            call = asyncio.create_task(tell(handle, change("load")))
            await until(lambda: a.loaded() == ["pirate"])
            assert not call.done()
            b.can_apply.set()
            changed = await call
            assert changed.previous is None
            assert a.applied[-1] == b.applied[-1] == AdapterRecords(changed.record.number, [changed.record])

    run(scenario())


def test_a_replica_that_does_not_apply_in_time_is_named_and_catches_up() -> None:
    async def scenario() -> None:
        handle = Handle()
        async with replicas(handle, "quick", "slow") as (_, slow):
            slow.can_apply.clear()
            with pytest.raises(Unhealthy, match="replica slow within"):
                await tell(handle, change("load"))
            slow.can_apply.set()
            await until(lambda: slow.loaded() == ["pirate"])
            await tell(handle, change("pin"))

    run(scenario())


def test_a_replica_that_is_slow_to_apply_is_not_taken_for_dead() -> None:
    async def scenario() -> None:
        handle = Handle(Patience(poll_s=0.1, gone_s=0.1, apply_s=5))
        async with replicas(handle, "slow") as (slow,):
            slow.can_apply.clear()
            call = asyncio.create_task(tell(handle, change("load")))
            await asyncio.wait([call], timeout=0.5)
            assert not call.done() and handle.registry._live().keys() == {"slow"}
            slow.can_apply.set()
            await call

    run(scenario())


def test_a_replica_that_has_died_holds_up_no_change_for_good() -> None:
    async def scenario() -> None:
        handle = Handle()
        async with replicas(handle, "alive", "dead") as (alive, dead):
            dead.task.cancel()
            await tell(handle, change("load"))
            assert alive.loaded() == ["pirate"] and handle.registry._live().keys() == {"alive"}

    run(scenario())


def test_a_replica_that_cannot_apply_says_why() -> None:
    async def scenario() -> None:
        handle = Handle()
        async with replicas(handle, "a") as (a,):
            a.failure = ValueError("out of paper")
            with pytest.raises(Unhealthy, match="replica a .*out of paper"):
                await tell(handle, change("load"))
            a.failure = None
            await tell(handle, change("pin"))
            assert a.loaded() == ["pirate"]

    run(scenario())


def test_without_replicas_nothing_can_be_changed_or_asked() -> None:
    async def scenario() -> None:
        with pytest.raises(Unhealthy, match="no driver replica"):
            await tell(Handle(), change("load"))
        with pytest.raises(Unhealthy, match="no driver replica"):
            await ask(Handle())

    run(scenario())


def test_a_replica_that_starts_later_gets_the_whole_set() -> None:
    async def scenario() -> None:
        handle = Handle()
        async with replicas(handle, "first"):
            await tell(handle, change("load", "pirate"))
            await tell(handle, change("load", "poet"))
            await tell(handle, change("unload", "pirate"))
            async with replicas(handle, "second") as (second,):
                await until(lambda: second.loaded() == ["poet"])

    run(scenario())


def test_a_registry_that_is_built_anew_gets_the_set_from_the_replicas() -> None:
    async def scenario() -> None:
        handle = Handle()
        async with replicas(handle, "a", "b") as (a, b):
            before = await tell(handle, change("load", "pirate", api_token="secret"))
            handle.rebuild()
            changed = await tell(handle, change("pin", "pirate"))
            assert changed.previous == before.record
            await until(lambda: handle.registry._live().keys() == {"a", "b"})
            await tell(handle, change("load", "poet"))
            assert a.loaded() == b.loaded() == ["pirate", "poet"]

    run(scenario())


def test_a_change_before_an_old_replica_is_heard_again_loses_nothing() -> None:
    async def scenario() -> None:
        handle = Handle()
        async with replicas(handle, "old") as (old,):
            await tell(handle, change("load", "pirate"))
            handle.rebuild()
            poll = {"replica_id": "new", "epoch": "", "number": 0, "applied": 0, "error": "", "question": 0}
            waiting = asyncio.create_task(handle.registry.changes(msgspec.msgpack.encode(poll)))
            await until(lambda: "new" in handle.registry._live())
            assert "old" not in handle.registry._live()
            with contextlib.suppress(Unhealthy):  # "new" is played by nobody and applies nothing
                await tell(handle, change("load", "poet"))
            await waiting
            await until(lambda: old.loaded() == ["pirate", "poet"])

    run(scenario())


def test_statuses_are_those_of_the_moment_from_every_replica() -> None:
    async def scenario() -> None:
        handle = Handle()
        async with replicas(handle, "a", "b") as (a, b):
            a.statuses = [status_of("pirate", "loading")]
            assert await ask(handle) == {"a": a.statuses, "b": []}
            a.statuses, b.statuses = [status_of("pirate", "gpu")], [status_of("pirate", "host")]
            assert await ask(handle) == {"a": a.statuses, "b": b.statuses}

    run(scenario())


def test_replicas_are_merged_by_version() -> None:
    merged = merge_replicas(
        [
            status_of(
                "pirate",
                "host",
                version="1",
                num_served=3,
                num_failed=2,
                num_running=1,
                host_bytes=10,
                last_used=5.0,
                gpu_use=TierUse(1, 0.5, 1),
            ),
            status_of("poet", "failed", version="", error="no such file"),
            status_of(
                "pirate", "gpu", version="1", num_served=4, num_failed=1, host_bytes=7, gpu_bytes=2, is_pinned=True, gpu_use=TierUse(2, 1.0)
            ),
            status_of("pirate", "unloading", version="0"),
        ]
    )
    fields: dict[str, Any] = {
        "num_served": 7,
        "num_running": 1,
        "num_failed": 3,
        "host_bytes": 10,
        "gpu_bytes": 2,
        "is_pinned": True,
        "last_used": 5.0,
    }
    fields["gpu_use"] = TierUse(3, 1.5, 1)
    assert merged == [
        status_of("pirate", "unloading", version="0"),
        status_of("pirate", "gpu", version="1", **fields),
        status_of("poet", "failed", version="", error="no such file"),
    ]


def test_a_change_that_its_only_replica_did_not_live_to_see_is_not_told_as_done() -> None:
    async def scenario() -> None:
        handle = Handle(Patience(poll_s=0.1, gone_s=0.1, apply_s=5, answer_s=0.1))
        async with replicas(handle, "dying") as (dying,):
            dying.can_apply.clear()
            call = asyncio.create_task(tell(handle, change("load")))
            await until(lambda: handle.registry._set.number > 0)
            dying.task.cancel()
            with pytest.raises(Unhealthy, match="no driver replica"):
                await call

    run(scenario())


def test_what_one_of_two_replicas_says_holds_for_both() -> None:
    quiet = status_of("pirate", "known", version="1", disk_use=TierUse(1, 0.5, 1))
    fields: dict[str, Any] = {"is_private": True, "is_pinned": True, "rank": 8, "last_used": 5.0, "disk_bytes": 30, "error": "no room"}
    telling = status_of("pirate", "known", version="1", disk_use=TierUse(2, 1.0), **fields)
    both = [status_of("pirate", "known", version="1", disk_use=TierUse(3, 1.5, 1), **fields)]
    assert merge_replicas([quiet, telling]) == merge_replicas([telling, quiet]) == both


def test_a_report_that_a_newer_one_has_overtaken_counts_no_more() -> None:
    async def scenario() -> None:
        registry = AdapterRegistry(QUICK)
        replica = registry._replicas["a"] = _Replica()
        for number, error, statuses in ((2, "torn", [status_of("pirate")]), (1, "", [])):
            report = Report(replica_id="a", applied=number, error=error, question=number, statuses=statuses)
            await registry.report(msgspec.msgpack.encode(report))
        assert (replica.applied, replica.error, replica.question) == (2, "torn", 2) and replica.statuses == [status_of("pirate")]

    run(scenario())


def test_a_replica_between_two_polls_is_still_waited_for() -> None:
    async def scenario() -> None:
        registry = AdapterRegistry(Patience(poll_s=0.05, gone_s=60, apply_s=60, answer_s=0.6))
        await registry.changes(msgspec.msgpack.encode(Poll(replica_id="a")))
        changing = asyncio.create_task(registry.change(msgspec.msgpack.encode(change("load"))))
        await until(lambda: registry._set.number > 0 or changing.done())
        assert not changing.done()
        number = registry._set.number
        await registry.changes(msgspec.msgpack.encode(Poll(replica_id="a", number=number, applied=number)))
        assert msgspec.msgpack.decode(await changing, type=Changed).record.number == number

    run(scenario())


def test_failed_loads_of_two_revisions_are_not_merged() -> None:
    failed = [status_of("pirate", "failed", version="", revision=name, error=f"{name} is torn") for name in ("main", "next")]
    assert merge_replicas(failed) == failed
