"""Whom an unload may still take an adapter from: from those alone who asked before it."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from loray.deployments import adapter_callers
from loray.deployments.adapter_callers import AdapterCallers
from loray.deployments.adapter_records import AdapterRecord
from loray.deployments.adapter_wishes import AdapterWishes
from loray.deployments.request import AdapterRef

NEXT_S = 0.05
BEFORE, UNLOAD, SINCE = 1, 2, 3  # moments
REF = AdapterRef(adapter_id="poet", source="hub")


class World:
    def __init__(self) -> None:
        self.wishes, self.ended = AdapterWishes(lambda ref: ref, str), list[AdapterRef]()
        self.callers = AdapterCallers(self.wishes.left_over, lambda key, unload: self.ended.append(key))

    def wish(self, is_loaded: bool = False, revision: str = "") -> None:
        ref = AdapterRef(adapter_id="poet", source="hub", revision=revision)
        self.wishes.records["poet"] = AdapterRecord(ref=ref, is_loaded=is_loaded, is_pinned=False, generation=0, number=UNLOAD)

    async def ask(self, began: int, seconds: float = 0.0) -> None:
        with self.callers.counted(REF, began):
            await asyncio.sleep(seconds)

    async def told(self) -> list[AdapterRef]:
        await asyncio.sleep(3 * NEXT_S)
        assert not self.callers._callers
        return self.ended


def run(work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """What raises later, in a timer, fails the test too."""
    failures: list[dict[str, Any]] = []

    async def watched() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, failure: failures.append(failure))
        await work()

    asyncio.run(watched())
    assert not failures


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.setattr(adapter_callers, "NEXT_S", NEXT_S)
    return World()


@pytest.mark.parametrize("num_times", [1, 3])
def test_what_all_have_asked_for_before_its_unload_is_ended_once(world: World, num_times: int) -> None:
    async def work() -> None:
        world.wish()
        for _ in range(num_times):
            await world.ask(BEFORE)
        assert not world.ended, "a moment after the last of them"
        assert await world.told() == [REF]

    run(work)


@pytest.mark.parametrize("is_loaded, revision", [(True, ""), (False, "other")])
def test_what_is_not_to_be_unloaded_stays(world: World, is_loaded: bool, revision: str) -> None:
    async def work() -> None:
        world.wish(is_loaded, revision)
        await world.ask(BEFORE)
        assert await world.told() == []

    run(work)


async def beside(world: World) -> None:
    with world.callers.counted(REF, SINCE):
        await world.ask(BEFORE)


async def shortly_after(world: World) -> None:
    await world.ask(BEFORE)
    await world.ask(SINCE)


async def still_running(world: World) -> None:
    await world.ask(BEFORE)
    await world.ask(SINCE, 2 * NEXT_S)


async def from_before_and_still_running(world: World) -> None:
    await world.ask(BEFORE)
    with world.callers.counted(REF, BEFORE):
        await asyncio.sleep(2 * NEXT_S)
        assert not world.ended, "it is in use"
    world.wish(is_loaded=True)


async def loaded_by_an_admin(world: World) -> None:
    await world.ask(BEFORE)
    world.wish(is_loaded=True)


@pytest.mark.parametrize("since", [beside, shortly_after, still_running, from_before_and_still_running, loaded_by_an_admin])
def test_what_is_wanted_since_its_unload_stays(world: World, since: Callable[[World], Coroutine[Any, Any, None]]) -> None:
    async def work() -> None:
        world.wish()
        await since(world)
        assert await world.told() == []

    run(work)
