"""What the disk cache holds is told to admins and leaves when they say so, whichever process has put it there."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
import pytest

from loray.deployments import adapter_callers, adapter_finder, adapter_service, adapter_store
from loray.deployments.adapter_records import AdapterChange, AdapterSet, now_ms
from loray.deployments.adapter_registry import merge_replicas
from loray.deployments.adapter_service import AdapterService
from loray.deployments.adapter_status import AdapterStatus
from loray.deployments.adapter_store import AdapterStore
from loray.deployments.adapters import Adapter
from loray.deployments.config import AdapterArgs
from loray.deployments.disk_cache import FOUND_S
from loray.deployments.errors import Overloaded
from loray.deployments.needed_folders import NeededFolders
from loray.deployments.request import AdapterRef
from loray.models.step import HostCopy
from tests.deployments.file_server import FileServer, Hold
from tests.deployments.peft_folder import SHAPES, save_folder
from tests.deployments.rank_in_process import PAGE_BYTES, RankInProcess, start_engine
from tests.deployments.replica_admin import ReplicaAdmin, settled

pytestmark = pytest.mark.slow  # downloads

HELD_S = 20  # at most, so that a failing test ends


class Store(AdapterStore):
    """Removes nothing while its door is closed, and finds nothing while its source does not answer."""

    def __init__(self, url: str, cache: Path, disk_bytes: int) -> None:
        super().__init__(AdapterArgs(allowed_urls=[url], disk_bytes=disk_bytes), SHAPES, cache)
        self.door = threading.Event()
        self.source = threading.Event()
        for event in (self.door, self.source):
            event.set()

    def find(self, ref: AdapterRef, asked: float | None = None) -> Adapter:
        self.source.wait(HELD_S)
        return super().find(ref, asked)

    def remove(self, ref: AdapterRef, path: str = "") -> None:
        self.door.wait(HELD_S)
        super().remove(ref, path)


class World:
    """A web server with an adapter, and a disk cache that driver replicas share."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.ref = self.save("mine", seed=0)
        self.num_bytes = sum(file.stat().st_size for file in (folder / "web" / "mine").iterdir())
        self._cache = folder / "cache"
        self.rank = RankInProcess()
        self._engine = start_engine(self.rank)

    @cached_property
    def web(self) -> FileServer:
        return FileServer(self._folder / "web")

    def save(self, name: str, seed: int) -> AdapterRef:
        save_folder(self._folder / "web" / name, rank=4, seed=seed)
        return AdapterRef(adapter_id=f"{self.web.url}/{name}")

    def replica(self, num_adapters: int = 10) -> tuple[AdapterService, Store]:
        """As good as a new process: it knows but the disk, where it keeps so many."""
        store = Store(self.web.url, self._cache, num_adapters * self.num_bytes)
        service = AdapterService(store, self._engine, max_waiting=2, page_bytes=PAGE_BYTES)
        return service, store

    def files(self) -> list[Path]:
        return list(self._cache.rglob("*.safetensors"))


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path)
    yield made
    made.web.close()


async def by_name(service: AdapterService) -> dict[str, AdapterStatus]:
    return {status.adapter_id: status for status in await service.statuses()}


def run(work: Any) -> None:
    asyncio.run(asyncio.wait_for(work, 30))


def test_what_an_earlier_process_downloaded_is_listed_and_unloading_it_frees_the_disk(world: World) -> None:
    async def work() -> None:
        found = await world.replica()[0].find(world.ref)
        service, _ = world.replica()
        (status,) = await service.statuses()
        assert (status.adapter_id, status.source, status.version) == (world.ref.adapter_id, "http", found.version)
        assert (status.state, status.disk_bytes, status.num_served) == ("known", world.num_bytes, 0)
        listed = AdapterRef(adapter_id=status.adapter_id, source=status.source, revision=status.revision)
        await ReplicaAdmin(service).change("unload", listed)
        assert await service.statuses() == [] and not world.files()

    run(work())


@pytest.mark.parametrize("tokens", [["mine", ""], ["", "mine"]], ids=str)
def test_a_download_that_anybody_has_begun_with_a_token_may_be_private(world: World, tokens: list[str]) -> None:
    async def work() -> None:
        service, store = world.replica()
        store.source.clear()
        asking = [asyncio.create_task(service.find(msgspec.structs.replace(world.ref, api_token=token))) for token in tokens]
        while len(service._finder.searching()) < 2:
            await asyncio.sleep(0.01)
        (status,) = await service.statuses()
        assert status.is_private
        store.source.set()
        await asyncio.gather(*asking)
        (status,) = await service.statuses()
        assert not status.is_private

    run(work())


def test_a_download_that_a_request_has_begun_is_listed_and_can_be_unloaded(world: World) -> None:
    async def work() -> None:
        service, store = world.replica()
        store.source.clear()
        asking = asyncio.create_task(service.find(msgspec.structs.replace(world.ref, api_token="mine")))
        while not (known := await service.statuses()):
            await asyncio.sleep(0.01)
        (status,) = known
        assert (status.adapter_id, status.state, status.version) == (world.ref.adapter_id, "loading", "")
        assert status.is_private, "nobody knows yet whether it is"
        await ReplicaAdmin(service).change("unload", AdapterRef(adapter_id=status.adapter_id, source=status.source))
        store.source.set()
        adapter = await asking
        running = await service._ask(lambda tiers: tiers.table.acquire(adapter))
        while not service._unloading:
            await asyncio.sleep(0.01)
        await service._ask(lambda tiers: (tiers.table.release(running), tiers.free_unused(running)))
        await settled(service)
        assert await service.statuses() == [] and not world.files()

    run(work())


def test_what_is_wanted_again_while_it_is_found_is_not_unloaded(world: World) -> None:
    async def work() -> None:
        service, store = world.replica()
        store.source.clear()
        asking = asyncio.create_task(service.find(world.ref))
        while not await service.statuses():
            await asyncio.sleep(0.01)
        admin = ReplicaAdmin(service)
        await admin.change("unload", world.ref)
        await admin.change("load", world.ref)
        store.source.set()
        await asking
        await settled(service)
        (status,) = await service.statuses()
        assert status.state == "host" and len(world.files()) == 1

    run(work())


def test_downloads_and_evictions_are_counted_for_each_and_for_all(world: World) -> None:
    async def work() -> None:
        service, _ = world.replica(num_adapters=1)
        await service.find(world.ref)
        await service.find(world.save("other", seed=1))
        await service.find(world.ref)
        uses = {status.adapter_id.rpartition("/")[2]: status.disk_use for status in await service.statuses()}
        assert {name: (use.num_loads, use.num_evictions) for name, use in uses.items()} == {"mine": (2, 1), "other": (1, 1)}
        assert all(0 < use.load_seconds < 30 for use in uses.values())
        assert service.disk_use() == uses["mine"] + uses["other"]

    run(work())


def test_it_is_one_adapter_beside_a_replica_that_serves_it(world: World) -> None:
    async def work() -> None:
        serving, idle = world.replica()[0], world.replica()[0]
        await serving.load(world.ref)
        (status,) = merge_replicas([*await serving.statuses(), *await idle.statuses()])
        assert (status.state, status.rank, status.disk_bytes) == ("host", 4, world.num_bytes)

    run(work())


def spelt_otherwise(ref: AdapterRef) -> AdapterRef:
    scheme, _, address = ref.adapter_id.partition("://")
    return AdapterRef(adapter_id=address, source=scheme)


def test_a_download_is_unloaded_by_any_spelling_of_its_url(world: World) -> None:
    async def work() -> None:
        service, _ = world.replica()
        admin = ReplicaAdmin(service)
        await admin.change("load", world.ref)
        await settled(service)
        await admin.change("unload", spelt_otherwise(world.ref))
        await settled(service)
        assert not await service.statuses() and not world.files()

    run(work())


def test_a_download_that_leaves_stays_when_it_is_loaded_by_its_other_spelling(world: World) -> None:
    async def work() -> None:
        service, _ = world.replica()
        admin = ReplicaAdmin(service)
        await admin.change("load", world.ref)
        await settled(service)
        adapter = await service.find(world.ref)
        await service._ask(lambda tiers: tiers.table.acquire(adapter))  # a request that goes on
        await admin.change("unload", world.ref)
        await admin.change("load", spelt_otherwise(world.ref))
        await settled(service)
        assert len(world.files()) == 1 and len(list(world.files()[0].parent.parent.glob("entry.json"))) == 1

    run(work())


def test_files_that_could_not_be_deleted_are_tried_with_the_next_change_unless_they_are_wanted_by_then(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(ref: AdapterRef, path: str = "") -> None:
        raise OSError("no space left")

    async def work() -> None:
        other = world.save("other", seed=1)
        for ref in (other, world.ref):
            await world.replica()[0].find(ref)
        service, store = world.replica()
        admin = ReplicaAdmin(service)
        with monkeypatch.context() as patch:
            patch.setattr(store, "remove", full)
            for ref in (other, world.ref):
                await admin.change("unload", ref)
            assert len(world.files()) == 2
            await admin.change("load", world.ref)
            await settled(service)
        await admin.change("load", "nobody")
        await settled(service)
        assert other.adapter_id not in await by_name(service) and len(world.files()) == 1
        assert (await by_name(service))[world.ref.adapter_id].state == "host"

    run(work())


def at_one_place(ref: AdapterRef, other: AdapterRef) -> Callable[..., str]:
    """The keys of a store where two ids mean one download, as a revision within an id and beside it do."""
    place_key = Store.place_key
    return lambda store, asked, path="": place_key(store, ref if asked.adapter_id == other.adapter_id else asked, path)


@pytest.mark.parametrize("is_pinned", [False, True])
def test_a_download_stays_when_it_is_being_found_by_another_id_as_its_last_request_ends(
    world: World, is_pinned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = world.save("other", seed=0)
    monkeypatch.setattr(Store, "place_key", at_one_place(world.ref, other))

    async def work() -> None:
        service, store = world.replica()
        admin = ReplicaAdmin(service)
        adapter = await service.find(world.ref)
        await service._ask(lambda tiers: tiers.table.acquire(adapter))  # a request
        await admin.change("unload", world.ref)
        store.source.clear()
        await admin.change("load", other, is_pinned=is_pinned)
        while not service._finder.is_searching(other):
            await asyncio.sleep(0.01)
        await service._ask(lambda tiers: (tiers.table.release(adapter), tiers.free_unused(adapter)))
        await asyncio.sleep(0.1)
        store.source.set()
        await settled(service)
        assert Path(adapter.path).is_dir() and not (Path(adapter.path) / "removed").exists()

    run(work())


def test_what_another_process_is_fetching_keeps_no_removal_waiting(world: World) -> None:
    """It hears of the unload too, and removes what it has fetched."""

    async def work() -> None:
        await world.replica()[0].find(world.ref)
        service, _ = world.replica()
        _, elsewhere = world.replica()
        key = elsewhere.place_key(world.ref)
        with elsewhere._cache.only_one(key):
            async with asyncio.timeout(HELD_S):
                await ReplicaAdmin(service).change("unload", world.ref)
            assert elsewhere._cache.entry(key), "it may have just been published"

    run(work())


def test_a_load_that_is_taken_back_while_it_downloads_leaves_no_files(world: World) -> None:
    async def work() -> None:
        service, store = world.replica()
        admin = ReplicaAdmin(service)
        store.source.clear()
        await admin.change("load", world.ref)
        while not service._finder.searching():
            await asyncio.sleep(0.01)
        await admin.change("unload", world.ref)
        store.source.set()
        await settled(service)
        assert not world.files() and not await by_name(service)

    run(work())


@pytest.mark.parametrize("end", ["served", "asked for since", "gone while it is found"])
def test_what_a_lost_replica_was_to_unload_is_gone_once_its_requests_have_ended_elsewhere(world: World, end: str) -> None:
    async def work() -> None:
        records, began_ms = AdapterSet(), now_ms()
        await asyncio.sleep(0.01)
        records.change(AdapterChange(action="unload", ref=world.ref))
        await asyncio.sleep(0.01)
        service, store = world.replica()
        await service.apply(msgspec.msgpack.encode(records.snapshot()))
        with service.asked(world.ref, began_ms):
            if end == "gone while it is found":
                store.source.clear()
                asking = asyncio.create_task(service.find(world.ref))
                while not service._finder.searching():
                    await asyncio.sleep(0.01)
                await asyncio.sleep(0.1)  # else nobody has begun to look for it
                asking.cancel()
            else:
                await service.load(world.ref)
                with service.asked(world.ref, 0 if end == "asked for since" else began_ms):
                    pass
                await settled(service)
                (status,) = await service.statuses()
                assert status.state == "host" and len(world.files()) == 1
        store.source.set()
        await asyncio.sleep(adapter_callers.NEXT_S + 0.1)
        await settled(service)
        assert [status.state for status in await service.statuses()] == ["host"] * (end == "asked for since")
        assert len(world.files()) == (end == "asked for since")

    run(work())


@pytest.mark.parametrize("is_freed_first", [True, False])
def test_what_was_unloaded_here_and_comes_back_with_a_request_of_a_lost_replica_goes_again(world: World, is_freed_first: bool) -> None:
    async def work() -> None:
        service, _ = world.replica()
        with service.asked(world.ref):
            adapter = await service.find(world.ref)
            running = await service._ask(lambda tiers: tiers.table.acquire(adapter))
            await asyncio.sleep(0.01)
            began_ms = now_ms()
            await asyncio.sleep(0.01)
            await ReplicaAdmin(service).change("unload", world.ref)
        with service.asked(world.ref, began_ms):
            again = await service.find(world.ref)
            with service.counted(world.ref, again):
                if is_freed_first:
                    await service._ask(lambda tiers: (tiers.table.release(running), tiers.free_unused(running)))
                    await asyncio.sleep(0.1)
        if not is_freed_first:
            await service._ask(lambda tiers: (tiers.table.release(running), tiers.free_unused(running)))
        await asyncio.sleep(adapter_callers.NEXT_S + 0.1)
        await settled(service)
        assert await service.statuses() == [] and not world.files()

    run(work())


def test_what_is_loaded_again_while_its_removal_waits_for_a_search_stays(world: World) -> None:
    async def work() -> None:
        service, store = world.replica()
        admin = ReplicaAdmin(service)
        await admin.change("load", world.ref)
        await settled(service)
        store.source.clear()
        asking = asyncio.create_task(service.find(world.ref))
        while not service._finder.searching():
            await asyncio.sleep(0.01)
        await admin.change("unload", world.ref)
        while not service._unloading:
            await asyncio.sleep(0.01)
        await admin.change("load", world.ref)
        store.source.set()
        await asking
        await settled(service)
        status = (await by_name(service))[world.ref.adapter_id]
        assert (status.state, status.disk_bytes) == ("host", world.num_bytes)

    run(work())


def test_unloading_what_is_on_disk_alone_leaves_what_another_id_is_loaded_from(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    other = world.save("other", seed=0)
    monkeypatch.setattr(Store, "place_key", at_one_place(other, world.ref))

    async def work() -> None:
        service, _ = world.replica()
        admin = ReplicaAdmin(service)
        await admin.change("load", other)
        await settled(service)
        await admin.change("unload", world.ref)
        await settled(service)
        assert len(world.files()) == 1 and (await by_name(service))[other.adapter_id].disk_bytes == world.num_bytes

    run(work())


def test_what_could_not_be_begun_is_tried_with_the_next_change(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    records = AdapterSet()
    records.change(AdapterChange(action="load", ref=world.ref))

    async def work() -> None:
        service, store = world.replica()
        with monkeypatch.context() as patch:
            patch.setattr(store, "forget", lambda ref: (_ for _ in ()).throw(OSError("no")))
            await service.apply(msgspec.msgpack.encode(records.snapshot()))
        assert not world.files()
        await service.apply(msgspec.msgpack.encode(records.snapshot()))
        await settled(service)
        assert len(world.files()) == 1

    run(work())


def test_many_unloads_at_once_take_hardly_longer_than_one(world: World) -> None:
    async def work() -> None:
        refs = [world.save(f"other{number}", seed=number) for number in range(8)]
        for ref in refs:
            await world.replica(num_adapters=20)[0].find(ref)
        service, _ = world.replica(num_adapters=20)
        wishes = AdapterSet()
        for ref in refs:
            wishes.change(AdapterChange(action="unload", ref=ref))
        began = asyncio.get_running_loop().time()
        await service.apply(msgspec.msgpack.encode(wishes.snapshot()))
        assert asyncio.get_running_loop().time() - began < len(refs) * FOUND_S and not world.files()

    run(work())


def test_a_source_that_stalls_keeps_nobody_from_unloading_others(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter_finder, "NUM_REMOVERS", 2)

    async def work() -> None:
        stalling = [world.save(f"other{number}", seed=number) for number in range(2)]
        await world.replica()[0].find(world.ref)
        service, store = world.replica(num_adapters=20)
        admin = ReplicaAdmin(service)
        for ref in stalling:
            await service.find(ref)
        hold = Hold()
        for ref in stalling:
            world.web.rules[f"{ref.adapter_id.removeprefix(world.web.url)}/adapter_config.json"] = hold
            world.save(Path(ref.adapter_id).name, seed=100)
            await admin.change("reload", ref)
        while not hold.held.is_set():
            await asyncio.sleep(0.01)
        for ref in stalling:
            await admin.change("unload", ref)
        while len(service._unloading) < len(stalling) or store._fetching.in_use() == []:
            await asyncio.sleep(0.01)
        await admin.change("unload", world.ref)
        assert world.ref.adapter_id not in await by_name(service)
        hold.released.set()
        await settled(service)
        assert not world.files() and not await service.statuses()

    run(work())


def test_an_adapter_is_unloading_until_its_files_are_gone(world: World) -> None:
    async def work() -> None:
        service, store = world.replica()
        await service.load(world.ref)
        store.door.clear()
        await ReplicaAdmin(service).change("unload", world.ref)
        (status,) = await service.statuses()
        assert (status.state, status.host_bytes, status.disk_bytes) == ("unloading", 0, world.num_bytes)
        store.door.set()
        while await service.statuses():
            await asyncio.sleep(0.01)
        assert not world.files()

    run(work())


def test_an_older_version_that_runs_on_through_an_unload_is_gone_from_disk_with_its_last_request(world: World) -> None:
    async def work() -> None:
        service, store = world.replica()
        old = await service.find(world.ref)
        with service.counted(world.ref, old):
            with service.counted(world.ref, old):
                world.save("mine", seed=1)
                store.forget(world.ref)
                await service.load(world.ref)
                assert len(world.files()) == 2
                await ReplicaAdmin(service).change("unload", world.ref)
                await settled(service)
                assert [str(file.parent) for file in world.files()] == [old.path]
            await settled(service)
            assert len(world.files()) == 1, "one request still needs it"
        await settled(service)
        assert not world.files() and not Path(old.path).parent.exists()

    run(work())


def test_what_is_loaded_again_before_its_last_request_has_ended_stays_on_disk(world: World) -> None:
    async def work() -> None:
        service, _ = world.replica()
        adapter = await service.find(world.ref)
        with service.counted(world.ref, adapter):
            await ReplicaAdmin(service).change("unload", world.ref)
            await settled(service)
            assert (await service.find(world.ref)).path == adapter.path
        await settled(service)
        assert len(world.files()) == 1 and world.web.num_gets(".safetensors") == 2

    run(work())


def test_what_is_unloaded_while_it_is_read_is_gone_from_disk_when_its_load_ends(world: World) -> None:
    async def work() -> None:
        service, _ = world.replica()
        reading: list[HostCopy] = []
        prepare, world.rank.prepare = world.rank.prepare, reading.append  # type: ignore[method-assign]  # it takes long
        await ReplicaAdmin(service).change("load", world.ref)
        while not reading:
            await asyncio.sleep(0.01)
        await ReplicaAdmin(service).change("unload", world.ref)
        while service._unloading:
            await asyncio.sleep(0.01)
        assert len(world.files()) == 1, "it is being read"
        prepare(reading[0])
        await settled(service)
        assert not world.files()

    run(work())


@pytest.mark.parametrize("is_pinned", [True, False])
def test_a_pin_keeps_files_on_disk_until_the_adapter_is_unloaded(world: World, is_pinned: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter_store, "ROOM_S", 0.0)

    async def work() -> None:
        service, _ = world.replica()
        await ReplicaAdmin(service).change("load", world.ref, is_pinned)
        await settled(service)
        assert len(world.files()) == 1
        other = world.save("other", seed=1)
        if is_pinned:
            with pytest.raises(Overloaded, match="in use or pinned take"):
                await world.replica(num_adapters=1)[0].find(other)
        else:
            await world.replica(num_adapters=1)[0].find(other)
        assert any("other" in str(file) for file in world.files()) != is_pinned
        await ReplicaAdmin(service).change("unload", world.ref)
        await settled(service)
        assert not any("mine" in str(file) for file in world.files())

    run(work())


def test_an_unpinned_adapters_files_may_go(world: World) -> None:
    async def work() -> None:
        service, _ = world.replica()
        await ReplicaAdmin(service).change("load", world.ref, is_pinned=True)
        await settled(service)
        await ReplicaAdmin(service).change("unpin", world.ref)
        await settled(service)
        await world.replica(num_adapters=1)[0].find(world.save("other", seed=1))
        assert ["other" in str(file) for file in world.files()] == [True]

    run(work())


def test_pins_leave_half_of_the_disk_to_others(world: World) -> None:
    async def work() -> None:
        service, _ = world.replica(num_adapters=4)
        admin, refs = ReplicaAdmin(service), [world.ref, *(world.save(f"other{i}", seed=i) for i in (1, 2))]
        for ref in refs:
            await admin.change("load", ref, is_pinned=True)
            await settled(service)
        told = [(await by_name(service))[ref.adapter_id] for ref in refs]
        assert [status.is_pinned for status in told] == [True, True, False] and not (told[0].error or told[1].error)
        assert f"cannot be pinned: with those that are, it would take {3 * world.num_bytes} bytes on disk" in told[2].error
        world.save("mine", seed=3)
        await admin.change("reload", world.ref)
        await settled(service)
        renewed = (await by_name(service))[world.ref.adapter_id]
        assert renewed.version != told[0].version and renewed.is_pinned and not renewed.error, "there is room for its new version"
        await admin.change("unpin", refs[1])
        await admin.change("pin", refs[2])
        await settled(service)
        assert (await by_name(service))[refs[2].adapter_id].is_pinned

    run(work())


def test_a_replica_neither_evicts_nor_unloads_what_a_request_of_another_needs(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter_store, "ROOM_S", 0.0)

    async def work() -> None:
        (serving, _), (other, other_store) = world.replica(), world.replica(num_adapters=1)
        adapter = await serving.find(world.ref)
        with serving.counted(world.ref, adapter):
            with pytest.raises(Overloaded, match="in use or pinned take"):
                await other.find(world.save("other", seed=1))
            await ReplicaAdmin(other).change("unload", world.ref)
            await settled(other)
            assert [str(file.parent) for file in world.files()] == [adapter.path] and other_store.disk_bytes(world.ref)
        await settled(serving)
        assert not world.files(), "who needed it last has freed it"

    run(work())


def test_another_replica_does_not_unload_what_is_being_read_into_host_memory(world: World) -> None:
    async def work() -> None:
        (service, _), (_, other) = world.replica(), world.replica()
        there: list[int] = []
        prepare = world.rank.prepare

        def prepare_late(copy: HostCopy) -> None:
            other.remove(world.ref)
            there.append(len(world.files()))
            prepare(copy)

        world.rank.prepare = prepare_late  # type: ignore[method-assign]
        await service.load(world.ref)
        await settled(service)
        assert there == [1] and not world.files()

    run(work())


def test_another_replica_does_not_unload_what_a_template_is_read_from(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    read = adapter_service.adapter_template

    def read_late(path: Path, adapter_id: str) -> str:
        world.replica()[1].remove(world.ref)
        return read(path, adapter_id)

    monkeypatch.setattr(adapter_service, "adapter_template", read_late)

    async def work() -> None:
        (world.web.root / "mine" / "chat_template.jinja").write_text("hello")
        service, _ = world.replica()
        assert (await service.chat_template(world.ref)).text == "hello"
        await settled(service)
        assert not world.files()

    run(work())


def test_an_adapter_that_is_looked_for_again_is_listed_once(world: World) -> None:
    async def work() -> None:
        service, store = world.replica()
        found = await service.find(world.ref)
        store.source.clear()
        asking = asyncio.create_task(service.find(world.ref))
        while not service._finder.searching():
            await asyncio.sleep(0)
        assert [(status.adapter_id, status.version) for status in await service.statuses()] == [(world.ref.adapter_id, found.version)]
        store.source.set()
        await asking

    run(work())


class Folders:
    """Notes what is asked of it; all that is let go was unloaded."""

    max_pinned_bytes = 100

    def __init__(self) -> None:
        self.calls: list[str] = []

    def hold(self, path: str) -> None:
        self.calls.append(f"hold {path}")

    def let_go(self, path: str) -> bool:
        self.calls.append(f"let go {path}")
        return True


def test_a_folder_is_held_for_each_who_needs_it_and_let_go_after_the_last() -> None:
    folders, unloaded, adapter = Folders(), [], Adapter("a", "a", "a", 1)
    needed = NeededFolders(folders, unloaded.append)
    with needed.needed(adapter), needed.needed(adapter):  # the first may have come while another process was deleting it
        assert folders.calls == ["hold a", "hold a"]
    assert folders.calls[2:] == ["let go a"] and unloaded == ["a"]


def test_a_folder_is_let_go_once_before_the_end_where_its_files_are_needed_no_more() -> None:
    folders, unloaded, adapter = Folders(), [], Adapter("a", "a", "a", 1)
    needed = NeededFolders(folders, unloaded.append)
    with needed.needed(adapter):
        with needed.needed(adapter) as let_go:
            let_go()
            let_go()
        assert folders.calls == ["hold a", "hold a"], "the other one needs it still"
    assert folders.calls[2:] == ["let go a"] and unloaded == ["a"]


def test_a_folder_that_stays_pinned_is_never_let_go_between_and_is_when_its_pin_ends() -> None:
    folders, unloaded, ref = Folders(), [], AdapterRef(adapter_id="a")
    needed = NeededFolders(folders, unloaded.append)
    old, new = (Adapter("a", path, path, 1) for path in ("old", "new"))
    needed.pin(ref, old, 60)
    needed.pin(ref, old, 60)
    assert folders.calls == ["hold old", "hold old"]
    needed.pin(ref, new, 60)
    assert folders.calls[2:] == ["hold new", "let go old"]
    needed.unpin([ref])
    assert unloaded == ["old", "new"]


def test_a_download_whose_other_spelling_was_unloaded_before_can_be_unloaded(world: World) -> None:
    async def work() -> None:
        service, _ = world.replica()
        admin = ReplicaAdmin(service)
        for ref in (spelt_otherwise(world.ref), world.ref):
            await world.replica()[0].find(world.ref)  # another process has it again
            await admin.change("unload", ref)
            assert not world.files()

    run(work())


def test_what_a_request_has_found_again_before_its_last_request_has_ended_stays_on_disk(world: World) -> None:
    async def work() -> None:
        service, _ = world.replica()
        adapter = await service.find(world.ref)
        running = await service._ask(lambda tiers: tiers.table.acquire(adapter))
        await ReplicaAdmin(service).change("unload", world.ref)
        await service.find(world.ref)
        await service._ask(lambda tiers: (tiers.table.release(running), tiers.free_unused(running)))
        await settled(service)
        assert len(world.files()) == 1 and [status.state for status in await service.statuses()] == ["known"]

    run(work())
