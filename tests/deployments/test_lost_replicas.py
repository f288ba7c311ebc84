"""What admins are told when the only driver replica is lost while they ask: the registry with real followers."""

import asyncio

import pytest

from loray.deployments.adapter_records import AdapterSet
from loray.deployments.adapter_registry import Patience
from loray.deployments.adapter_status import AdapterStatus
from loray.deployments.errors import Unhealthy
from tests.deployments.scripted_backend import run, status_of
from tests.deployments.test_adapter_registry import Handle, Replica, ask, change, replicas, tell, until

pytestmark = pytest.mark.slow  # waits

SHIPPED = Patience()
SHORT = Patience(SHIPPED.poll_s / 10, SHIPPED.gone_s / 10, SHIPPED.apply_s / 10, SHIPPED.answer_s / 10)


@pytest.mark.parametrize("action", ["load", "unload"])
def test_a_change_that_no_replica_lived_to_tell_of_is_undone(action: str) -> None:
    async def scenario() -> None:
        handle = Handle(SHORT)
        async with replicas(handle, "dying") as (dying,):
            await tell(handle, change("load", is_pinned=True))
            (before,) = handle.registry._set.snapshot().records
            dying.can_apply.clear()
            call = asyncio.create_task(tell(handle, change(action, revision="v2")))
            await until(lambda: handle.registry._set.number > before.number)
            dying.task.cancel()
            with pytest.raises(Unhealthy, match="no driver replica"):
                await call
            (after,) = handle.registry._set.snapshot().records
            assert (after.ref, after.is_loaded, after.is_pinned) == (before.ref, True, True)

    run(scenario())


@pytest.mark.parametrize("has_answered", [True, False])
def test_where_the_only_replica_is_dead_nobody_is_told_that_there_are_no_adapters_or_what_they_were(has_answered: bool) -> None:
    async def scenario() -> None:
        handle = Handle(SHORT)
        async with replicas(handle, "dying") as (dying,):
            dying.statuses = [status_of("pirate")]
            if has_answered:
                assert await ask(handle) == {"dying": dying.statuses}
            dying.task.cancel()
            with pytest.raises(Unhealthy, match="no driver replica"):
                await ask(handle)

    run(scenario())


def test_a_replica_whose_adapters_take_long_to_look_at_is_waited_for_and_not_taken_for_dead() -> None:
    async def scenario() -> None:
        handle = Handle(SHORT)
        async with replicas(handle, "slow") as (slow,):
            door, listed = asyncio.Event(), [status_of("pirate")]

            async def slow_statuses() -> list[AdapterStatus]:
                await door.wait()
                return listed

            slow.follower._statuses = slow_statuses
            looks = [asyncio.create_task(ask(handle)) for _ in range(2)]
            await asyncio.sleep(1.5 * SHORT.gone_s)
            assert handle.registry._live().keys() == {"slow"} and not any(look.done() for look in looks)
            door.set()
            assert [await look for look in looks] == [{"slow": listed}] * 2

    run(scenario())


def test_a_replica_that_has_told_nothing_yet_counts_as_one_that_has_loaded_nothing() -> None:
    """Who waits for a load must not take the others' word for it."""

    async def scenario() -> None:
        handle = Handle(SHORT)
        async with replicas(handle, "quick") as (quick,):
            quick.statuses = [status_of("pirate")]
            slow = Replica(handle, "slow")
            slow.can_tell.clear()
            await until(lambda: "slow" in handle.registry._live())
            assert await ask(handle) == {"quick": quick.statuses, "slow": []}
            slow.task.cancel()

    run(scenario())


def test_what_was_told_to_a_registry_that_is_lost_answers_no_question_of_the_next() -> None:
    async def scenario() -> None:
        handle = Handle(SHORT)
        async with replicas(handle, "slow") as (slow,):
            door, told = asyncio.Event(), [status_of("old")]

            async def slow_statuses() -> list[AdapterStatus]:
                statuses = list(told)
                await door.wait()
                return statuses

            slow.follower._statuses = slow_statuses
            lost = [asyncio.create_task(ask(handle)) for _ in range(5)]
            await until(lambda: slow.follower._answering is not None)
            await asyncio.sleep(0.05)
            handle.rebuild()
            await until(lambda: handle.registry._live().keys() == {"slow"})
            look = asyncio.create_task(ask(handle))
            await asyncio.sleep(0.05)
            told[:] = [status_of("new")]
            door.set()
            assert await look == {"slow": told}
            for task in lost:
                task.cancel()

    run(scenario())


def test_undoing_a_change_that_changed_nothing_does_nothing() -> None:
    records = AdapterSet()
    loaded = records.change(change("load"))
    records.undo(records.change(change("unpin")))
    assert records.snapshot().records == [loaded.record]


def test_who_follows_a_registry_of_an_application_that_is_deleted_stops_and_brings_its_set_to_no_other() -> None:
    async def scenario() -> None:
        handle = Handle(SHORT)
        async with replicas(handle, "draining") as (draining,):
            await tell(handle, change("load", api_token="secret"))
            handle.registry.is_over = True
            await until(draining.task.done)
            handle.rebuild()
            await asyncio.sleep(0.1)
            assert not handle.registry._set.snapshot().records

    run(scenario())
