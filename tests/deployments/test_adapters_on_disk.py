"""What the disk cache holds is told to admins and leaves when they say so, whichever process has put it there."""

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from loray.deployments.adapter_records import AdapterChange, AdapterSet
from loray.deployments.adapter_registry import merge_replicas
from loray.deployments.adapter_service import AdapterService
from loray.deployments.adapter_store import AdapterStore
from loray.deployments.config import AdapterArgs
from loray.deployments.engine import Engine
from loray.deployments.request import AdapterRef
from tests.deployments.file_server import FileServer
from tests.deployments.peft_folder import SHAPES, save_folder
from tests.deployments.rank_in_process import PAGE_BYTES, RankInProcess, start_engine

HELD_S = 5  # at most, so that a failing test ends


class Store(AdapterStore):
    """Removes nothing while its door is closed."""

    def __init__(self, url: str, cache: Path) -> None:
        super().__init__(AdapterArgs(allowed_urls=[url]), SHAPES, cache)
        self.door = threading.Event()
        self.door.set()

    def remove(self, ref: AdapterRef, path: str = "") -> None:
        self.door.wait(HELD_S)
        super().remove(ref, path)


class World:
    """A web server with an adapter, and a disk cache that driver replicas share."""

    def __init__(self, folder: Path, engine: Engine) -> None:
        save_folder(folder / "web" / "mine", rank=4)
        self.web = FileServer(folder / "web")
        self.ref = AdapterRef(adapter_id=f"{self.web.url}/mine")
        self.num_bytes = sum(file.stat().st_size for file in (folder / "web" / "mine").iterdir())
        self._cache = folder / "cache"
        self._engine = engine

    def replica(self) -> tuple[AdapterService, Store]:
        """As good as a new process: it knows but the disk."""
        store = Store(self.web.url, self._cache)
        service = AdapterService(store, self._engine, max_waiting=2, page_bytes=PAGE_BYTES)
        store.in_use = service.in_use
        return service, store

    def files(self) -> list[Path]:
        return list(self._cache.rglob("*.safetensors"))


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path, start_engine(RankInProcess()))
    yield made
    made.web.close()


def run(work: Any) -> None:
    asyncio.run(asyncio.wait_for(work, 30))


async def change(service: AdapterService, action: Any, ref: AdapterRef) -> None:
    wanted = AdapterSet()
    wanted.change(AdapterChange(action=action, ref=ref))
    await service.apply(msgspec.msgpack.encode(wanted.snapshot()))


def test_what_an_earlier_process_downloaded_is_listed_and_unloading_it_frees_the_disk(world: World) -> None:
    async def work() -> None:
        found = await world.replica()[0].find(world.ref)
        service, _ = world.replica()
        (status,) = await service.statuses()
        assert (status.adapter_id, status.source, status.version) == (world.ref.adapter_id, "http", found.version)
        assert (status.state, status.disk_bytes, status.num_served) == ("known", world.num_bytes, 0)
        await change(service, "unload", AdapterRef(adapter_id=status.adapter_id, source=status.source, revision=status.revision))
        assert await service.statuses() == [] and not world.files()

    run(work())


def test_it_is_one_adapter_beside_a_replica_that_serves_it(world: World) -> None:
    async def work() -> None:
        serving, idle = world.replica()[0], world.replica()[0]
        await serving.load(world.ref)
        (status,) = merge_replicas([*await serving.statuses(), *await idle.statuses()])
        assert (status.state, status.rank, status.disk_bytes) == ("host", 4, world.num_bytes)

    run(work())


def test_an_adapter_is_unloading_until_its_files_are_gone(world: World) -> None:
    async def work() -> None:
        service, store = world.replica()
        await service.load(world.ref)
        store.door.clear()
        await change(service, "unload", world.ref)
        (status,) = await service.statuses()
        assert (status.state, status.host_bytes, status.disk_bytes) == ("unloading", 0, world.num_bytes)
        store.door.set()
        while await service.statuses():
            await asyncio.sleep(0.01)
        assert not world.files()

    run(work())
