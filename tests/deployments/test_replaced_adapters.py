"""Admins give an id another revision, or ask for what is held while the hub is away: whoever uses what was there goes on using it."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from loray.deployments.adapter_records import Changed
from loray.deployments.adapter_service import AdapterService
from loray.deployments.adapter_status import AdapterStatus
from loray.deployments.adapter_store import AdapterStore
from loray.deployments.config import AdapterArgs
from loray.deployments.errors import AdapterNotFound
from loray.deployments.replaced_adapters import ReplacedAdapters
from loray.deployments.request import AdapterRef
from tests.deployments.file_server import Handler, HubServer
from tests.deployments.peft_folder import SHAPES, save_folder
from tests.deployments.rank_in_process import PAGE_BYTES, RankInProcess, start_engine
from tests.deployments.replica_admin import ReplicaAdmin, settled

pytestmark = pytest.mark.slow  # downloads

SECONDS = 10
NEWEST, MAIN, NOWHERE = (AdapterRef(adapter_id="org/it", source="hub", revision=revision) for revision in ("", "main", "nope"))
LOCAL = AdapterRef(adapter_id="org/it", source="local")


class Hub(HubServer):
    """Fails while it is away, and answers about a held revision when the door is open."""

    is_away = False
    held = "none"

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.door = threading.Event()

    def answer(self, handler: Handler) -> None:
        if f"/revision/{self.held}" in handler.path:
            assert self.door.wait(SECONDS)
        return handler.reply(500) if self.is_away else super().answer(handler)


class World:
    """A driver replica, what admins want of it, and a hub. The pool has room for one pinned adapter of this size, not for two."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for root in ("hub", "local"):
            save_folder(folder / root / "org" / "it", rank=16)
        self.hub = Hub(folder / "hub")

    def start(self) -> None:
        self.store = AdapterStore(AdapterArgs(local_roots=[self.folder / "local"]), SHAPES, self.folder / "cache")
        self.rank = RankInProcess()
        self.service = AdapterService(self.store, start_engine(self.rank), max_waiting=2, page_bytes=PAGE_BYTES)
        self.admin = ReplicaAdmin(self.service)

    async def done(self, action: Any, ref: AdapterRef, is_pinned: bool = False) -> Changed:
        changed = await self.admin.change(action, ref, is_pinned)
        await self.settled()
        return changed

    async def undo(self, changed: Changed) -> None:
        await self.admin.undo(changed)
        await self.settled()

    async def settled(self) -> None:
        await settled(self.service)

    async def status(self, ref: AdapterRef) -> AdapterStatus | None:
        wanted = (ref.adapter_id, ref.source, ref.revision)
        found = [each for each in await self.service.statuses() if (each.adapter_id, each.source, each.revision) == wanted]
        return found[0] if found else None

    def num_files(self) -> int:
        return len(list((self.folder / "cache").rglob("*.safetensors")))


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    made = World(tmp_path)
    made.hub.stand_in(monkeypatch, tmp_path / "hf")
    made.start()
    yield made
    made.hub.door.set()
    made.hub.close()


def run(work: Callable[[], Any]) -> None:
    asyncio.run(asyncio.wait_for(work(), 30))


@pytest.mark.parametrize("is_pinned", [True, False])
def test_a_load_of_another_revision_that_fails_leaves_the_good_one_where_it_was(world: World, is_pinned: bool) -> None:
    async def work() -> None:
        await world.done("load", NEWEST, is_pinned)
        failed = await world.done("load", NOWHERE)
        for _ in range(2):
            good = await world.status(NEWEST)
            assert good and (good.state, good.is_pinned) == ("host", is_pinned) and good.disk_bytes and world.num_files() == 1
            assert (await world.service.find(NEWEST)).rank == 16
            world.hub.is_away = True
            await world.undo(failed)
        assert await world.status(NOWHERE) is None

    run(work)


@pytest.mark.parametrize("is_pinned", [True, False])
def test_a_load_of_another_revision_unloads_the_one_before_when_it_is_there(world: World, is_pinned: bool) -> None:
    async def work() -> None:
        await world.done("load", NEWEST, is_pinned)
        await world.done("load", MAIN)
        new = await world.status(MAIN)
        assert new and (new.state, new.is_pinned, new.error) == ("host", is_pinned, "")
        assert await world.status(NEWEST) is None and world.num_files() == 1

    run(work)


def test_what_the_id_meant_before_stays_until_a_load_of_what_requests_have_used_already_is_over(world: World) -> None:
    async def work() -> None:
        await world.done("load", LOCAL)
        await world.service.find(MAIN)
        world.hub.held = "main"
        await world.admin.change("load", MAIN)
        await world.service._unload_replaced("org/it")  # as the end of a load does that was overtaken
        before = await world.status(LOCAL)
        assert before and before.state == "host"
        world.hub.door.set()
        await world.settled()
        assert await world.status(LOCAL) is None and await world.status(MAIN)

    run(work)


def test_unloading_what_is_on_its_way_unloads_what_the_id_meant_before(world: World) -> None:
    async def work() -> None:
        await world.done("load", NEWEST, is_pinned=True)
        world.hub.held = "main"
        await world.admin.change("load", MAIN)
        assert await world.status(NEWEST)
        await world.admin.change("unload", MAIN)
        while world.service._unloading:
            await asyncio.sleep(0.01)
        assert await world.status(NEWEST) is None and world.num_files() == 0
        world.hub.door.set()
        await world.settled()

    run(work)


def test_a_load_that_is_taken_back_leaves_the_download_that_requests_use(world: World) -> None:
    async def work() -> None:
        await world.done("load", NEWEST)
        await world.service.find(MAIN)
        world.hub.is_away = True
        await world.undo(await world.done("load", MAIN, is_pinned=True))
        assert (await world.service.find(MAIN)).rank == 16 and world.num_files() == 2
        statuses = [await world.status(ref) for ref in (NEWEST, MAIN)]
        assert [status and status.is_pinned for status in statuses] == [False, False]

    run(work)


@pytest.mark.parametrize("is_pinned", [True, False])
def test_a_load_that_another_source_has_overtaken_is_not_carried_out(world: World, is_pinned: bool) -> None:
    async def work() -> None:
        world.hub.held = "main"
        await world.admin.change("load", MAIN, is_pinned)
        await world.admin.change("load", LOCAL, is_pinned)
        while (local := await world.status(LOCAL)) is None or local.state != "host":
            await asyncio.sleep(0.01)
        world.hub.door.set()
        await world.settled()
        (status,) = await world.service.statuses()
        assert (status.source, status.is_pinned) == ("local", is_pinned) and world.num_files() == 0
        assert [copy.path for copy in world.rank.prepared] == [str(world.folder / "local" / "org" / "it")]

    run(work)


@pytest.mark.parametrize("action", ["pin", "unpin"])
def test_pin_and_unpin_ask_no_source(world: World, action: str) -> None:
    async def work() -> None:
        await world.service.find(NEWEST)
        if action == "unpin":
            await world.done("pin", NEWEST)
        world.hub.is_away = True
        num_requests = len(world.hub.requests)
        await world.done(action, NEWEST)
        status = await world.status(NEWEST)
        assert status and (status.state, status.is_pinned, status.error) == ("host", action == "pin", "")
        assert (await world.service.find(NEWEST)).rank == 16 and len(world.hub.requests) == num_requests

    run(work)


@pytest.mark.parametrize("action", ["load", "reload"])
def test_what_is_held_is_served_on_when_an_admin_asks_for_news_and_the_source_is_away(world: World, action: str) -> None:
    async def work() -> None:
        old = await world.service.find(NEWEST)
        save_folder(world.folder / "hub" / "org" / "it", rank=16, seed=1)
        world.hub.is_away = True
        changed = await world.done(action, NEWEST)
        status = await world.status(NEWEST)
        assert status and status.state == "host" and "the hub answered 500" in status.error, "the admin is told"
        assert (await world.service.find(NEWEST)).version == old.version
        await world.undo(changed)
        assert (await world.service.find(NEWEST)).version == old.version
        world.hub.is_away = False
        await world.done("reload", NEWEST)
        status = await world.status(NEWEST)
        assert status and status.version != old.version and not status.error

    run(work)


def test_after_a_reload_of_what_its_source_has_no_more_it_is_not_served(world: World) -> None:
    async def work() -> None:
        await world.service.find(NEWEST)
        (world.folder / "hub" / "org" / "it").rename(world.folder / "hub" / "org" / "gone")
        await world.done("reload", NEWEST)
        with pytest.raises(AdapterNotFound):
            await world.service.find(NEWEST)

    run(work)


def test_unpinning_what_is_not_pinned_changes_nothing(world: World) -> None:
    async def work() -> None:
        before = await world.service.statuses()
        await world.done("unpin", AdapterRef(adapter_id="merge of a, b", source="hub"))
        assert await world.service.statuses() == before == []

    run(work)


def test_a_pin_after_a_reload_asks_no_source(world: World) -> None:
    async def work() -> None:
        await world.done("load", NEWEST)
        await world.done("reload", NEWEST)
        world.hub.is_away = True
        num_requests = len(world.hub.requests)
        await world.done("pin", NEWEST)
        status = await world.status(NEWEST)
        assert status and (status.state, status.is_pinned, status.error) == ("host", True, "") and len(world.hub.requests) == num_requests

    run(work)


def test_when_all_that_an_id_meant_is_taken_back_at_once_no_pin_of_it_stays(world: World) -> None:
    async def work() -> None:
        first = await world.done("load", NEWEST, is_pinned=True)
        second = await world.done("load", NOWHERE, is_pinned=True)
        for changed in (second, first):
            world.admin._set.undo(changed)
        await world.admin.apply()
        await world.settled()
        status = await world.status(NEWEST)
        assert status and not status.is_pinned and not world.service._folders._pinned

    run(work)


def test_an_unpin_holds_for_what_the_id_meant_before_too(world: World) -> None:
    async def work() -> None:
        await world.done("load", NEWEST, is_pinned=True)
        await world.done("load", NOWHERE)
        await world.done("unpin", NOWHERE)
        status = await world.status(NEWEST)
        assert status and (status.state, status.is_pinned) == ("host", False) and not world.service._folders._pinned

    run(work)


def test_ids_whose_former_meanings_are_gone_are_not_kept_in_mind() -> None:
    replaced = ReplacedAdapters()
    for ref in (NEWEST, MAIN):
        replaced.add("org/it", ref)
    replaced.drop("org/it", NEWEST)
    assert replaced.of("org/it") == [MAIN]
    replaced.drop("org/it", MAIN)
    assert replaced.of("org/it") == [] and not replaced._refs


def test_what_an_id_meant_before_it_was_unloaded_is_left_to_the_requests_that_have_found_it_since(world: World) -> None:
    async def work() -> None:
        await world.done("load", NEWEST)
        await world.done("unload", NEWEST)
        await world.service.find(NEWEST)
        await world.done("load", MAIN)
        status = await world.status(NEWEST)
        assert status and status.disk_bytes

    run(work)
