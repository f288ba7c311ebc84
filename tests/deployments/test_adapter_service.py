"""A driver replica's adapters, over a real store, a real engine and a simulated rank."""

import asyncio
import threading
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import msgspec
import pytest

from loray.deployments.adapter_records import AdapterChange, AdapterSet
from loray.deployments.adapter_service import AdapterService
from loray.deployments.adapter_status import AdapterStatus
from loray.deployments.adapter_store import AdapterStore
from loray.deployments.adapters import Adapter
from loray.deployments.config import AdapterArgs
from loray.deployments.engine import ABORTED, Engine
from loray.deployments.errors import AdapterFailed, AdapterNotFound, Overloaded
from loray.deployments.request import AdapterRef
from tests.deployments.peft_folder import SHAPES, save_folder
from tests.deployments.rank_in_process import PAGE_BYTES, RankInProcess, start_engine

SECONDS = 10


class Store(AdapterStore):
    """Holds back those who look for what is in `held`."""

    def __init__(self, root: Path, cache: Path) -> None:
        super().__init__(AdapterArgs(local_roots=[root]), SHAPES, cache)
        self.held = ""
        self.door = threading.Event()
        self.removed: list[str] = []

    def find(self, ref: AdapterRef) -> Adapter:
        if ref.adapter_id == self.held:
            assert self.door.wait(SECONDS)
        return super().find(ref)

    def remove(self, ref: AdapterRef) -> None:
        super().remove(ref)
        self.removed.append(ref.adapter_id)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name, rank in (("small", 4), ("large", 16), ("huge", 64)):
        save_folder(tmp_path / "root" / name, rank)
    return tmp_path / "root"


@pytest.fixture
def steps() -> RankInProcess:
    return RankInProcess()


@pytest.fixture
def engine(steps: RankInProcess) -> Engine:
    return start_engine(steps)


@pytest.fixture
def store(root: Path, tmp_path: Path) -> Store:
    return Store(root, tmp_path / "cache")


@pytest.fixture
def service(store: Store, engine: Engine) -> AdapterService:
    return AdapterService(store, engine, max_waiting=2, page_bytes=PAGE_BYTES)


def run(work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(work, 30))


def ref(adapter_id: str) -> AdapterRef:
    return AdapterRef(adapter_id=adapter_id)


async def statuses(service: AdapterService) -> dict[str, AdapterStatus]:
    return {status.adapter_id: status for status in await service.statuses()}


async def settled(service: AdapterService, adapter_id: str) -> AdapterStatus:
    while (status := (await statuses(service))[adapter_id]).state == "loading":
        await asyncio.sleep(0.01)
    return status


async def gone(service: AdapterService, adapter_id: str) -> None:
    while adapter_id in await statuses(service):
        await asyncio.sleep(0.01)


class Admin:
    """Changes the set as the registry does, and has the service act on the whole of it."""

    def __init__(self, service: AdapterService) -> None:
        self._service = service
        self._set = AdapterSet()

    async def change(self, action: Any, adapter_id: str, is_pinned: bool = False) -> None:
        self._set.change(AdapterChange(action=action, ref=ref(adapter_id), is_pinned=is_pinned))
        await self._service.apply(msgspec.msgpack.encode(self._set.snapshot()))


def test_requests_are_counted_by_how_they_ended(service: AdapterService) -> None:
    async def work() -> AdapterStatus:
        adapter = await service.find(ref("small"))
        for error in ("", "", "AdapterFailed", ABORTED):
            with service.counted(ref("small"), adapter) as note:
                assert service.in_use(adapter.path) and (await statuses(service))["small"].num_running == 1
                note(error)
        assert not service.in_use(adapter.path)
        return (await statuses(service))["small"]

    status = run(work())
    assert (status.num_running, status.num_served, status.num_failed, status.rank, status.state) == (0, 2, 1, 4, "known")
    assert status.last_used > 0


def test_who_asks_for_what_is_not_there_leaves_no_trace(service: AdapterService) -> None:
    async def work() -> dict[str, AdapterStatus]:
        for i in range(50):
            with pytest.raises(AdapterNotFound):
                await service.find(ref(f"nobody{i}"))
        return await statuses(service)

    assert run(work()) == {}


def test_a_slow_search_holds_up_only_its_own_and_at_most_so_many(service: AdapterService, store: Store) -> None:
    async def work() -> None:
        store.held = "large"
        waiting = [asyncio.create_task(service.find(ref("large"))) for _ in range(2)]
        await asyncio.sleep(0)
        with pytest.raises(Overloaded, match="large"):
            await service.find(ref("large"))
        assert (await service.find(ref("small"))).rank == 4
        assert not any(task.done() for task in waiting)
        store.door.set()
        assert [adapter.rank for adapter in await asyncio.gather(*waiting)] == [16, 16]

    run(work())


def test_load_is_through_when_the_ranks_have_it_and_says_why_when_it_fails(
    service: AdapterService, steps: RankInProcess, root: Path
) -> None:
    async def work() -> dict[str, AdapterStatus]:
        await service.load(ref("large"))
        steps.lost_paths = {str(root / "small")}
        for adapter_id, reason in (("small", "could not be read"), ("huge", "rank pages"), ("nobody", "nobody")):
            with pytest.raises(AdapterFailed, match=reason):
                await service.load(ref(adapter_id))
        return await statuses(service)

    known = run(work())
    assert (known["large"].state, known["large"].host_bytes, known["large"].is_pinned) == ("host", PAGE_BYTES, False)
    assert {name: status.state for name, status in known.items() if name != "large"} == dict.fromkeys(("small", "huge", "nobody"), "failed")
    assert "rank pages" in known["huge"].error


def test_another_version_takes_the_place_of_the_old_one(service: AdapterService, engine: Engine, root: Path) -> None:
    async def work() -> None:
        await service.load(ref("small"))
        old = (await statuses(service))["small"].version
        save_folder(root / "small", 8, seed=1)
        new = await service.find(ref("small"))
        places = await asyncio.wrap_future(engine.call(lambda tiers: tiers.places([old, new.version])))
        assert new.version != old and not places, "the old one is freed, the new one not loaded yet"

    run(work())


def test_preloading_waits_for_the_good_and_survives_the_bad(service: AdapterService, caplog: pytest.LogCaptureFixture) -> None:
    async def work() -> dict[str, AdapterStatus]:
        await service.preload(["small", "nobody", "large"])
        return await statuses(service)

    known = run(work())
    assert {name: status.state for name, status in known.items()} == {"small": "host", "large": "host", "nobody": "failed"}
    assert "nobody" in caplog.text


def test_what_admins_want_is_done_once(service: AdapterService, steps: RankInProcess, store: Store) -> None:
    async def work() -> None:
        admin = Admin(service)
        await admin.change("load", "small", is_pinned=True)
        assert (await settled(service, "small")).is_pinned
        await admin.change("load", "large")
        assert (await settled(service, "large")).state == "host"
        assert len(steps.prepared) == 2, "the first record was not acted on again"
        await admin.change("unpin", "small")
        assert not (await settled(service, "small")).is_pinned
        await admin.change("unload", "small")
        await gone(service, "small")
        assert set(await statuses(service)) == {"large"}
        while store.removed != ["small"]:
            await asyncio.sleep(0.01)

    run(work())


def test_a_reload_looks_again_and_a_pin_that_is_taken_back_is_gone(service: AdapterService, root: Path) -> None:
    async def work() -> None:
        admin = Admin(service)
        await admin.change("load", "small", is_pinned=True)
        old = (await settled(service, "small")).version
        save_folder(root / "small", 8, seed=1)
        await admin.change("reload", "small")
        new = await settled(service, "small")
        assert new.version != old and new.is_pinned and new.state == "host"
        await service.apply(msgspec.msgpack.encode(AdapterSet().snapshot()))
        assert not (await settled(service, "small")).is_pinned

    run(work())
