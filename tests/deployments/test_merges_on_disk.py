"""Merges on disk are told to admins and leave when they say so, whichever process has made them."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest

from loray.deployments import adapter_callers, disk_cache
from loray.deployments.adapter_records import AdapterChange, AdapterSet, now_ms
from loray.deployments.adapter_service import AdapterService
from loray.deployments.adapter_status import AdapterStatus
from loray.deployments.adapter_store import AdapterStore
from loray.deployments.config import AdapterArgs
from loray.deployments.engine import Engine
from loray.deployments.errors import AdapterFailed
from loray.deployments.request import AdapterRef
from tests.deployments.file_server import FileServer
from tests.deployments.merging_here import merge_ref, merging
from tests.deployments.peft_folder import SHAPES, save_folder
from tests.deployments.rank_in_process import PAGE_BYTES, RankInProcess, start_engine
from tests.deployments.replica_admin import ReplicaAdmin, settled

NAME, OTHER = "merge of small, large", "merge of small"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name, rank in (("small", 4), ("large", 16)):
        save_folder(tmp_path / "root" / name, rank)
    return tmp_path / "root"


@pytest.fixture
def engine() -> Engine:
    return start_engine(RankInProcess())


def new_store(root: Path, merges: list[Path] | None = None) -> AdapterStore:
    """As another process has it."""
    store = AdapterStore(AdapterArgs(local_roots=[root]), SHAPES, root.parent / "cache")
    store.merge = merging(merges if merges is not None else [])
    return store


def make(store: AdapterStore, ref: AdapterRef, is_private: bool = False) -> Path:
    """Where it is. is_private: the first of its parts."""
    assert ref.merge is not None
    parts = [store.find(AdapterRef(adapter_id=part)) for part in ref.merge.adapter_ids]
    parts[0].is_private = is_private
    return Path((store.held_merge(ref, parts) or store.merged(ref, parts)).path)


def test_what_an_earlier_process_has_merged_is_listed_by_its_name_and_removed_by_it_alone(root: Path) -> None:
    halves, wholes, other = (
        merge_ref(NAME, "small", "large", weights=(0.5, 0.5)),
        merge_ref(NAME, "small", "large", weights=(1.0, 1.0)),
        merge_ref(OTHER, "small", weights=(0.5,)),
    )
    earlier = new_store(root)
    paths = {ref: make(earlier, ref, is_private=ref is halves) for ref in (halves, wholes, other)}
    store = new_store(root)
    left = {ref: (Path(adapter.path), adapter.is_private) for ref, adapter in store.left_on_disk(set())}
    assert left == {ref: (path, ref is halves) for ref, path in paths.items()}
    known = {store.place_key(halves, str(paths[halves]))}
    assert {ref for ref, _ in store.left_on_disk(known)} == {wholes, other}
    store.remove(halves, str(paths[halves]))
    assert [path.exists() for path in paths.values()] == [False, True, True]
    make(store, halves)
    store.remove(AdapterRef(adapter_id=NAME))
    assert [path.exists() for path in paths.values()] == [False, False, True]


def test_two_processes_make_a_merge_once(root: Path) -> None:
    ref, merges = merge_ref(OTHER, "small", weights=(0.5,)), list[Path]()
    begun, door = threading.Event(), threading.Event()
    first, second = new_store(root), new_store(root, merges)

    def merge_late(*args: Any) -> None:
        begun.set()
        assert door.wait(10)
        merging(merges)(*args)

    first.merge = merge_late
    with ThreadPoolExecutor(2) as threads:
        made = threads.submit(make, first, ref)
        assert begun.wait(10)
        found = threads.submit(make, second, ref)
        with pytest.raises(TimeoutError):
            found.result(0.3)
        door.set()
        assert made.result(10) == found.result(10)
    assert len(merges) == 1


def test_where_nothing_can_be_written_a_merge_fails_and_says_why(root: Path) -> None:
    (root.parent / "cache").write_text("no folder")
    with pytest.raises(AdapterFailed, match=f"{NAME}.*(exists|directory)"):
        make(new_store(root), merge_ref(NAME, "small", "large", weights=(1.0, 1.0)))


def test_a_token_is_not_written_to_disk_with_what_it_has_merged(root: Path) -> None:
    ref = AdapterRef(adapter_id=OTHER, api_token="hf_secret", merge=merge_ref(OTHER, "small", weights=(0.5,)).merge)
    path = make(new_store(root), ref)
    assert all(b"hf_secret" not in file.read_bytes() for file in path.parent.rglob("*") if file.is_file())


def test_a_merge_is_as_private_as_its_parts_are_now_and_found_again_by_who_may_read_them(root: Path) -> None:
    ref = merge_ref(NAME, "small", "large", weights=(0.5, 0.5))
    path, store = make(new_store(root), ref), new_store(root)
    for is_private in (True, False, True):
        assert make(store, ref, is_private) == path
        assert [adapter.is_private for _, adapter in store.left_on_disk(set())] == [is_private]


@pytest.mark.slow  # downloads
def test_a_part_that_can_not_be_merged_is_named_by_its_id_and_not_by_its_downloads_folder(tmp_path: Path) -> None:
    for name in ("plain", "biased"):
        save_folder(tmp_path / "web" / name, rank=4, has_bias=name == "biased")
    with closing(FileServer(tmp_path / "web")) as web:
        store, url = AdapterStore(AdapterArgs(allowed_urls=[web.url]), SHAPES, tmp_path / "cache"), f"{web.url}/biased"
        store.merge = merging([])
        with pytest.raises(AdapterFailed, match=f"adapter '{url}': tensor .* can be merged") as raised:
            make(store, merge_ref(OTHER, f"{web.url}/plain", url, weights=(0.5, 0.5)))
        assert Path(store.find(AdapterRef(adapter_id=url)).path).name not in raised.value.message


def test_many_merges_of_a_name_are_removed_in_one_go(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, naps = new_store(root), []
    paths = [make(store, merge_ref(OTHER, "small", weights=(0.5 + number,))) for number in range(9)]
    monkeypatch.setattr(disk_cache.time, "sleep", naps.append)
    store.remove(AdapterRef(adapter_id=OTHER))
    assert not any(path.exists() for path in paths) and naps == [disk_cache.FOUND_S]


def test_what_is_made_again_while_it_is_removed_stays(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, ref = new_store(root), merge_ref(OTHER, "small", weights=(0.5,))
    path = make(store, ref)
    monkeypatch.setattr(disk_cache.time, "sleep", lambda seconds: make(new_store(root), ref))
    store.remove(AdapterRef(adapter_id=OTHER))
    assert (path / "adapter_model.safetensors").exists() and make(new_store(root), ref) == path


def test_a_new_replica_tells_of_merges_and_unloads_all_of_a_name(root: Path, engine: Engine) -> None:
    merges_made: list[Path] = []
    earlier, service = (AdapterService(new_store(root, merges_made), engine, max_waiting=2, page_bytes=PAGE_BYTES) for _ in range(2))
    used, other = (merge_ref(NAME, "small", "large", weights=weights) for weights in ((0.5, 0.5), (0.25, 0.25)))

    async def merges() -> list[AdapterStatus]:
        return [status for status in await service.statuses() if status.is_merge]

    async def work() -> None:
        left, before = Path((await earlier.find(other)).path), Path((await earlier.find(used)).path)
        assert Path((await service.find(other)).path) == left and len(merges_made) == 2
        save_folder(root / "large", 16, seed=8)
        assert [(status.adapter_id, status.state, status.disk_bytes > 0) for status in await merges()] == [(NAME, "known", True)] * 2
        await service.load(used)
        now = Path((await service.find(used)).path)
        assert sorted(status.state for status in await merges()) == ["host", "known", "known"] and now not in (left, before)
        assert len(merges_made) == 3
        await ReplicaAdmin(service).change("unload", NAME)
        while await merges():
            await asyncio.sleep(0.01)
        assert not any(path.exists() for path in (left, before, now))

    asyncio.run(asyncio.wait_for(work(), 30))


def test_what_is_being_merged_while_its_name_is_unloaded_goes_when_it_is_there(root: Path, engine: Engine) -> None:
    door, store = threading.Event(), new_store(root)

    def merge_late(*args: Any) -> None:
        assert args[1] == (0.5,) or door.wait(10)
        merging([])(*args)

    store.merge = merge_late
    service = AdapterService(store, engine, max_waiting=2, page_bytes=PAGE_BYTES)

    async def work() -> None:
        await service.load(merge_ref(OTHER, "small", weights=(0.5,)))
        late = asyncio.create_task(service.find(merge_ref(OTHER, "small", weights=(0.25,))))
        while not service._finder._merging:
            await asyncio.sleep(0.01)
        await ReplicaAdmin(service).change("unload", OTHER)
        door.set()
        path = Path((await late).path)
        while path.exists() or [status for status in await service.statuses() if status.is_merge]:
            await asyncio.sleep(0.01)

    asyncio.run(asyncio.wait_for(work(), 30))


def test_a_merge_that_only_an_earlier_replica_used_is_unloaded_too(root: Path, engine: Engine) -> None:
    path = make(new_store(root), merge_ref(OTHER, "small", weights=(0.5,)))
    service = AdapterService(new_store(root), engine, max_waiting=2, page_bytes=PAGE_BYTES)

    async def work() -> None:
        await ReplicaAdmin(service).change("unload", OTHER)
        while path.exists():
            await asyncio.sleep(0.01)

    asyncio.run(asyncio.wait_for(work(), 30))


def test_a_merge_that_a_lost_replica_was_to_unload_is_gone_once_its_request_has_ended_elsewhere(root: Path, engine: Engine) -> None:
    ref, records, began_ms = merge_ref(OTHER, "small", weights=(0.5,)), AdapterSet(), now_ms()
    service = AdapterService(new_store(root), engine, max_waiting=2, page_bytes=PAGE_BYTES)

    async def work() -> None:
        await asyncio.sleep(0.01)
        records.change(AdapterChange(action="unload", ref=AdapterRef(adapter_id=OTHER)))
        await service.apply(msgspec.msgpack.encode(records.snapshot()))
        with service.asked(ref, began_ms):
            adapter = await service.find(ref)
            with service.counted(ref, adapter):
                assert Path(adapter.path).exists()
        while Path(adapter.path).exists() or [status for status in await service.statuses() if status.is_merge]:
            await asyncio.sleep(0.01)

    asyncio.run(asyncio.wait_for(work(), 30))


def test_a_merge_that_is_asked_for_since_an_unload_stays_when_one_by_its_name_that_was_asked_for_before_ends(
    root: Path, engine: Engine
) -> None:
    before, since = (merge_ref(OTHER, "small", weights=(weight,)) for weight in (0.5, 0.7))
    service = AdapterService(new_store(root), engine, max_waiting=2, page_bytes=PAGE_BYTES)

    async def work() -> None:
        with service.asked(before):
            old = await service.find(before)
            with service.counted(before, old):
                await asyncio.sleep(0.01)
                await ReplicaAdmin(service).change("unload", OTHER)
                await asyncio.sleep(0.01)
                with service.asked(since):
                    new = await service.find(since)
                    with service.counted(since, new):
                        pass
        await asyncio.sleep(adapter_callers.NEXT_S + 0.1)
        while Path(old.path).exists():
            await asyncio.sleep(0.01)
        await settled(service)
        (status,) = [status for status in await service.statuses() if status.is_merge]
        assert status.version == new.version and Path(new.path).exists()

    asyncio.run(asyncio.wait_for(work(), 30))


def test_all_merges_by_a_name_go_with_its_last_request_though_one_of_them_is_leaving_still(root: Path, engine: Engine) -> None:
    here, elsewhere = (merge_ref(OTHER, "small", weights=(weight,)) for weight in (0.5, 0.7))
    service, began_ms = AdapterService(new_store(root), engine, max_waiting=2, page_bytes=PAGE_BYTES), now_ms()

    async def work() -> None:
        with service.asked(here, began_ms):
            leaving = await service.find(here)
            running = await service._ask(lambda tiers: tiers.table.acquire(leaving))
            with service.counted(here, leaving):
                await asyncio.sleep(0.01)
                await ReplicaAdmin(service).change("unload", OTHER)
                with service.asked(elsewhere, began_ms):  # on a replica that was lost
                    taken_over = await service.find(elsewhere)
                    with service.counted(elsewhere, taken_over):
                        pass
        await asyncio.sleep(adapter_callers.NEXT_S + 0.1)
        await service._ask(lambda tiers: (tiers.table.release(running), tiers.free_unused(running)))
        while Path(taken_over.path).exists() or [status for status in await service.statuses() if status.is_merge]:
            await asyncio.sleep(0.01)

    asyncio.run(asyncio.wait_for(work(), 30))
