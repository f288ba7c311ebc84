"""A driver replica's adapters, over a real store, a real engine and a simulated rank."""

import asyncio
import threading
from collections.abc import Collection, Coroutine
from glob import glob
from pathlib import Path
from typing import Any

import msgspec
import pytest

from loray.deployments import adapter_report, adapter_service, adapter_uses
from loray.deployments.adapter_records import AdapterChange, AdapterRecord, AdapterSet
from loray.deployments.adapter_service import AdapterService
from loray.deployments.adapter_status import AdapterStatus
from loray.deployments.adapter_store import AdapterStore
from loray.deployments.adapter_tiers import AdapterPlace, AdapterTiers
from loray.deployments.adapter_use import AdapterUse
from loray.deployments.adapters import Adapter
from loray.deployments.config import AdapterArgs
from loray.deployments.engine import ABORTED, Engine
from loray.deployments.errors import AdapterFailed, AdapterNotFound, Overloaded
from loray.deployments.request import AdapterRef, MergeRecipe
from loray.models.merging import MergeMethod, merge_adapters
from tests.deployments.file_server import FileServer
from tests.deployments.peft_folder import SHAPES, save_folder
from tests.deployments.rank_in_process import PAGE_BYTES, RankInProcess, start_engine
from tests.deployments.replica_admin import ReplicaAdmin

SECONDS = 10


class Store(AdapterStore):
    """Holds back those who look for what is in `held`."""

    def __init__(self, root: Path, cache: Path) -> None:
        super().__init__(AdapterArgs(local_roots=[root]), SHAPES, cache)
        self.held = ""
        self.door = threading.Event()
        self.removed: list[str] = []

    def find(self, ref: AdapterRef, asked: float | None = None) -> Adapter:
        if ref.adapter_id == self.held:
            assert self.door.wait(SECONDS)
        return super().find(ref, asked)

    def remove(self, ref: AdapterRef, path: str = "") -> None:
        super().remove(ref, path)
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


def test_requests_are_counted_by_how_they_ended(service: AdapterService) -> None:
    async def work() -> AdapterStatus:
        adapter = await service.find(ref("small"))
        for error in ("", "", "AdapterFailed", ABORTED):
            with service.counted(ref("small"), adapter) as (_, note):
                assert (await statuses(service))["small"].num_running == 1
                note(error)
        return (await statuses(service))["small"]

    status = run(work())
    assert (status.num_running, status.num_served, status.num_failed, status.rank, status.state) == (0, 2, 1, 4, "known")
    assert status.last_used > 0


def test_a_request_that_finds_an_adapter_broken_counts_as_failed(service: AdapterService, root: Path) -> None:
    async def work() -> AdapterStatus:
        await service.find_patiently(ref("small"), lambda: None)
        (root / "small" / "adapter_model.safetensors").write_bytes(b"torn")
        for _ in range(2):
            with pytest.raises(AdapterFailed):
                await service.find_patiently(ref("small"), lambda: None)
        return (await statuses(service))["small"]

    status = run(work())
    assert status.num_failed == 2 and "is cut short" in status.last_failure


def test_a_chat_that_ends_at_the_adapters_template_counts_as_failed(service: AdapterService, root: Path) -> None:
    async def work() -> list[AdapterStatus]:
        await service.find(ref("small"))
        (root / "small" / "tokenizer_config.json").write_text("{")
        with pytest.raises(AdapterFailed):
            await service.chat_template(ref("small"))
        first = (await statuses(service))["small"]
        (root / "small" / "adapter_model.safetensors").write_bytes(b"torn")
        with pytest.raises(AdapterFailed):
            await service.chat_template(ref("small"))
        return [first, (await statuses(service))["small"]]

    first, second = run(work())
    assert (first.num_failed, second.num_failed) == (1, 2)
    assert "tokenizer_config.json" in first.last_failure and "is cut short" in second.last_failure


def test_why_an_adapters_last_request_failed_is_told_until_one_is_served(service: AdapterService) -> None:
    async def work() -> None:
        adapter = await service.find(ref("small"))
        told = []
        for ending in (("AdapterFailed", "its numbers are not finite"), ("Overloaded", "too many"), (ABORTED, ""), ("", "")):
            with service.counted(ref("small"), adapter) as (_, note):
                note(*ending)
            told.append((await statuses(service))["small"].last_failure)
        assert told == ["its numbers are not finite"] * 3 + [""]

    run(work())


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
        for adapter_id, reason in (("small", "torn"), ("huge", "rank pages"), ("nobody", "nobody")):
            with pytest.raises(AdapterFailed, match=reason):
                await service.load(ref(adapter_id))
        return await statuses(service)

    known = run(work())
    assert (known["large"].state, known["large"].host_bytes, known["large"].is_pinned) == ("host", PAGE_BYTES, False)
    assert {name: status.state for name, status in known.items() if name != "large"} == dict.fromkeys(("small", "huge", "nobody"), "failed")
    assert "rank pages" in known["huge"].error


def test_a_renewal_whose_source_is_away_says_so_and_what_is_held_is_loaded(tmp_path: Path, engine: Engine) -> None:
    save_folder(tmp_path / "web" / "small", 4)
    web = FileServer(tmp_path / "web")
    store = AdapterStore(AdapterArgs(allowed_urls=[web.url]), SHAPES, tmp_path / "cache")
    service, small = AdapterService(store, engine, max_waiting=2, page_bytes=PAGE_BYTES), ref(f"{web.url}/small")

    async def work() -> None:
        held = await service.find(small)
        web.rules["/small/adapter_config.json"] = lambda handler: handler.reply(500) is None
        store.forget(small)
        with pytest.raises(AdapterFailed, match="answered 500"):
            await service.load(small, is_renewed=True)
        status = (await statuses(service))[small.adapter_id]
        assert (status.state, status.version) == ("host", held.version) and "answered 500" in status.error
        assert (await service.find(small)).version == held.version

    try:
        run(work())
    finally:
        web.close()


def test_an_error_of_a_load_is_told_until_the_adapter_serves(service: AdapterService, steps: RankInProcess, root: Path) -> None:
    async def work() -> None:
        steps.lost_paths = {str(root / "small")}
        with pytest.raises(AdapterFailed, match="torn"):
            await service.load(ref("small"))
        adapter = await service.find(ref("small"))
        with service.counted(ref("small"), adapter) as (_, note):
            with pytest.raises(AdapterFailed, match="torn"):
                await service.load(ref("small"))
            note("")
        assert (await statuses(service))["small"].error, "that one had begun before"
        for error, told in (("AdapterFailed", True), ("", False)):
            with service.counted(ref("small"), adapter) as (_, note):
                note(error)
            assert bool((await statuses(service))["small"].error) == told

    run(work())


def test_an_error_of_a_pin_is_told_though_the_adapter_serves(service: AdapterService, steps: RankInProcess, root: Path) -> None:
    """A pin is tried again."""

    async def work() -> None:
        steps.lost_paths = {str(root / "small")}
        await ReplicaAdmin(service).change("load", "small", is_pinned=True)
        assert "torn" in (await settled(service, "small")).error
        adapter = await service.find(ref("small"))
        with service.counted(ref("small"), adapter) as (_, note):
            note("")
        status = (await statuses(service))["small"]
        assert status.num_served == 1 and "torn" in status.error

    run(work())


def test_only_so_many_loads_wait_for_their_arrival_at_once(service: AdapterService, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = [f"a{i}" for i in range(2 * adapter_service.NUM_LOADS + 2)]
    for name in names:
        save_folder(root / name, 4)
    waiting: set[str] = set()
    most = 0

    async def work() -> None:
        door = asyncio.Event()

        async def slow_arrival(engine: Engine, adapter: Adapter) -> None:
            nonlocal most
            waiting.add(adapter.adapter_id)
            most = max(most, len(waiting))
            await door.wait()
            await asyncio.sleep(0)
            waiting.remove(adapter.adapter_id)

        monkeypatch.setattr(adapter_service, "arrival", slow_arrival)
        loads = [asyncio.create_task(service.load(ref(name))) for name in names]
        while sum(use.adapter is not None for use in service._uses.values()) < len(names):
            await asyncio.sleep(0.01)
        await service._ask(lambda tiers: None)  # after all that they have asked
        assert len(waiting) == adapter_service.NUM_LOADS
        door.set()
        await asyncio.gather(*loads)
        assert most == adapter_service.NUM_LOADS

    run(work())


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
        admin = ReplicaAdmin(service)
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


@pytest.mark.parametrize("is_pinned", [True, False])
def test_a_failed_load_that_is_taken_back_leaves_nothing_in_the_list(service: AdapterService, is_pinned: bool) -> None:
    async def work() -> None:
        admin = ReplicaAdmin(service)
        await service.load(ref("small"))
        for adapter_id, source in (("s3://small", "s3"), ("nobody", "local")):  # the one is also by a right source, the other nowhere
            changed = await admin.change("load", AdapterRef(adapter_id=adapter_id, source=source), is_pinned)
            while any(status.state == "loading" for status in await service.statuses()):
                await asyncio.sleep(0.01)
            failed = [status for status in await service.statuses() if status.state == "failed"]
            assert [(status.adapter_id, status.source) for status in failed] == [(adapter_id, source)]
            await admin.undo(changed)
            assert [(status.adapter_id, status.source, status.state) for status in await service.statuses()] == [("small", "local", "host")]

    run(work())


def test_a_load_that_fails_after_it_was_taken_back_leaves_nothing_in_the_list(service: AdapterService, store: Store) -> None:
    async def work() -> None:
        admin = ReplicaAdmin(service)
        store.held = "nobody"
        changed = await admin.change("load", "nobody")
        await admin.undo(changed)
        assert (await statuses(service))["nobody"].state == "loading"
        store.door.set()
        await gone(service, "nobody")

    run(work())


def test_a_pin_outlives_a_moment_in_which_its_files_were_away(service: AdapterService, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter_service, "RETRY_S", 0.05)

    async def work() -> None:
        (root / "small").rename(root.parent / "away")
        await ReplicaAdmin(service).change("pin", "small")
        assert (await settled(service, "small")).state == "failed"
        (root.parent / "away").rename(root / "small")
        while not (status := (await statuses(service))["small"]).is_pinned:
            await asyncio.sleep(0.02)
        assert status.error == ""

    run(work())


def test_a_pin_that_failed_is_tried_again_whatever_becomes_of_an_older_load(
    service: AdapterService, store: Store, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapter_service, "RETRY_S", 0.1)

    async def work() -> None:
        admin = ReplicaAdmin(service)
        (root / "small").rename(root.parent / "away")
        store.held = "small"
        await admin.change("load", "small")
        await asyncio.sleep(0.05)
        store.held = ""
        await admin.change("pin", "small")
        while not service._retries:
            await asyncio.sleep(0.005)
        store.door.set()  # the older one fails too
        await asyncio.sleep(0.05)
        (root.parent / "away").rename(root / "small")
        while not (await statuses(service))["small"].is_pinned:
            await asyncio.sleep(0.01)
        assert not service._retries

    run(work())


def test_a_pin_whose_loads_fail_again_and_again_is_tried_no_more_often(
    service: AdapterService, store: Store, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    retry_s, finds, find = 0.1, list[AdapterRef](), store.find
    monkeypatch.setattr(adapter_service, "RETRY_S", retry_s)
    monkeypatch.setattr(store, "find", lambda ref, asked: (finds.append(ref), find(ref, asked))[1])

    async def work() -> None:
        admin, clock = ReplicaAdmin(service), asyncio.get_running_loop().time
        (root / "small").rename(root.parent / "away")
        for action in ("pin", *["reload"] * 5):
            await admin.change(action, "small")
            while service._tasks:
                await asyncio.sleep(0.001)
        assert len(service._retries) == 1
        finds.clear()
        began = clock()
        await asyncio.sleep(5 * retry_s)
        assert len(finds) <= 1 + (clock() - began) / retry_s
        while service._tasks:  # one of the tries
            await asyncio.sleep(0.001)
        assert len(service._retries) == 1

    run(work())


def test_a_load_that_is_taken_back_leaves_what_was_found(service: AdapterService, steps: RankInProcess, root: Path) -> None:
    async def work() -> None:
        admin = ReplicaAdmin(service)
        steps.lost_paths = {str(root / "small")}
        changed = await admin.change("load", "small")
        assert (await settled(service, "small")).state == "failed"
        await admin.undo(changed)
        status = (await statuses(service))["small"]
        assert status.rank == 4 and "torn" in status.error, "it is here, and can't be loaded"

    run(work())


def test_who_waits_for_a_slow_adapter_is_told_so_and_gets_it(
    service: AdapterService, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    monkeypatch.setattr(adapter_service, "SLOW_S", 0.01)
    store.held = "small"

    def on_slow() -> None:
        told.append("slow")
        store.door.set()

    assert run(service.find_patiently(ref("small"), on_slow)).adapter_id == "small" and told == ["slow"]


def test_what_an_admin_wants_and_can_not_be_done_keeps_nobody_from_the_rest(
    service: AdapterService, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(ref: AdapterRef, path: str = "") -> None:
        raise OSError("no space left")

    async def work() -> None:
        wanted = AdapterSet()
        wanted.change(AdapterChange(action="unload", ref=ref("gone")))
        wanted.change(AdapterChange(action="load", ref=ref("large"), is_pinned=True))
        with monkeypatch.context() as patch:
            patch.setattr(store, "remove", full)
            await service.apply(msgspec.msgpack.encode(wanted.snapshot()))
        assert (await settled(service, "large")).is_pinned and not store.removed
        await service.apply(msgspec.msgpack.encode(wanted.snapshot()))
        assert store.removed == ["gone"], "the next time it was done"

    run(work())


def test_an_adapter_is_one_with_and_without_its_source(service: AdapterService) -> None:
    async def work() -> None:
        await ReplicaAdmin(service).change("load", "small", is_pinned=True)
        await settled(service, "small")
        await service.find(AdapterRef(adapter_id="small", source="local"))
        (status,) = await service.statuses()
        assert (status.source, status.is_pinned) == ("local", True)
        await ReplicaAdmin(service).change("unpin", "small")
        (status,) = await service.statuses()
        assert not status.is_pinned

    run(work())


def test_unloading_a_merge_by_its_name_frees_its_tiers_and_its_files(service: AdapterService, store: Store, tmp_path: Path) -> None:
    def merge(folders: Any, weights: Any, method: dict[str, Any], shapes: Any, out: Path) -> None:
        merge_adapters(folders, weights, MergeMethod(**method), shapes, out)

    store.merge = merge  # the real one, in this process
    name, files = "merge of small, large", "cache/merge-*/*/adapter_model.safetensors"

    async def work() -> None:
        for weights in ((0.5, 0.5), (1.0, 1.0)):  # both go by one name
            recipe = MergeRecipe(adapter_ids=("small", "large"), weights=weights)
            await service.load(AdapterRef(adapter_id=name, merge=recipe))
        merges = [status for status in await service.statuses() if status.adapter_id == name]
        assert [status.state for status in merges] == ["host", "host"] and all(status.disk_bytes for status in merges)
        assert len(list(tmp_path.glob(files))) == 2
        await ReplicaAdmin(service).change("unload", name)
        await gone(service, name)
        while glob(f"{tmp_path}/{files}"):  # pathlib's fails where a folder goes meanwhile
            await asyncio.sleep(0.01)

    run(work())


def test_a_reload_looks_again_and_a_pin_that_is_taken_back_is_gone(service: AdapterService, root: Path) -> None:
    async def work() -> None:
        admin = ReplicaAdmin(service)
        await admin.change("load", "small", is_pinned=True)
        old = (await settled(service, "small")).version
        save_folder(root / "small", 8, seed=1)
        await admin.change("reload", "small")
        new = await settled(service, "small")
        assert new.version != old and new.is_pinned and new.state == "host"
        await service.apply(msgspec.msgpack.encode(AdapterSet().snapshot()))
        assert not (await settled(service, "small")).is_pinned

    run(work())


@pytest.mark.parametrize("action", ["unload", "unpin"])
def test_what_happens_to_one_name_of_a_folder_leaves_its_other_name_alone(service: AdapterService, root: Path, action: str) -> None:
    async def work() -> None:
        admin, path = ReplicaAdmin(service), str(root / "small")
        await admin.change("load", "small", is_pinned=True)
        await admin.change("load", path, is_pinned=True)
        assert (await settled(service, path)).is_pinned
        await admin.change(action, path)
        status = await settled(service, "small")
        assert (status.state, status.is_pinned, status.host_bytes) == ("host", True, PAGE_BYTES)
        await admin.change(action, "small")
        while "small" in (known := await statuses(service)) and known["small"].is_pinned:
            await asyncio.sleep(0.01)

    run(work())


def test_what_is_unloaded_between_a_requests_search_and_its_start_can_be_unloaded_again(service: AdapterService, engine: Engine) -> None:
    async def work() -> None:
        admin = ReplicaAdmin(service)
        adapter = await service.find(ref("small"))
        await admin.change("unload", "small")
        with service.counted(ref("small"), adapter):
            await asyncio.wrap_future(engine.call(lambda tiers: tiers.load(adapter)))
            assert (await statuses(service))["small"].version == adapter.version
            await admin.change("unload", "small")
        await gone(service, "small")
        assert engine.stats()["adapter_host_bytes_used"] == 0

    run(work())


def test_the_other_name_of_what_is_unloaded_has_no_pin_that_nobody_gave_it(service: AdapterService, root: Path) -> None:
    async def work() -> None:
        admin, path = ReplicaAdmin(service), str(root / "small")
        await admin.change("load", "small", is_pinned=True)
        await admin.change("load", path)
        await settled(service, path)
        await admin.change("unload", "small")
        status = await settled(service, path)
        assert (status.state, status.is_pinned) == ("host", False)

    run(work())


def test_a_name_that_was_unloaded_keeps_nothing_for_its_other_name(service: AdapterService, root: Path) -> None:
    async def work() -> None:
        admin, path = ReplicaAdmin(service), str(root / "small")
        await admin.change("load", "small")
        await admin.change("load", path)
        await settled(service, path)
        await admin.change("unload", path)
        await service.find(ref(path))  # as a request does
        await admin.change("unload", "small")
        await gone(service, "small")
        assert (await statuses(service))[path].host_bytes == 0

    run(work())


def test_a_link_that_leads_elsewhere_leaves_alone_what_it_led_to(service: AdapterService, root: Path) -> None:
    async def work() -> None:
        (root / "latest").symlink_to(root / "small")
        await ReplicaAdmin(service).change("load", "small", is_pinned=True)
        await settled(service, "small")
        old = await service.find(ref("latest"))
        (root / "latest").unlink()
        (root / "latest").symlink_to(root / "large")
        assert (await service.find(ref("latest"))).version != old.version
        status = await settled(service, "small")
        assert (status.state, status.is_pinned, status.version) == ("host", True, old.version)

    run(work())


def test_many_who_wait_for_one_download_take_one_thread(root: Path, tmp_path: Path, engine: Engine) -> None:
    class Slow(Store):
        num_searches = 0

        def is_local(self, ref: AdapterRef) -> bool:
            return False

        def find(self, ref: AdapterRef, asked: float | None = None) -> Adapter:
            self.num_searches += 1
            return super().find(ref, asked)

    store = Slow(root, tmp_path / "cache")
    service = AdapterService(store, engine, max_waiting=1000, page_bytes=PAGE_BYTES)

    async def work() -> None:
        store.held = "large"
        waiting = [asyncio.create_task(service.find(ref("large"))) for _ in range(500)]
        assert (await service.find(ref("small"))).rank == 4
        waiting[0].cancel()
        store.door.set()
        found = await asyncio.gather(*waiting[1:])
        assert {adapter.rank for adapter in found} == {16} and store.num_searches == 2

    run(work())


def test_equal_files_in_two_places_are_two_adapters(service: AdapterService, root: Path) -> None:
    save_folder(root / "twin", 4)

    async def work() -> None:
        admin = ReplicaAdmin(service)
        await admin.change("load", "small")
        await admin.change("load", "twin", is_pinned=True)
        assert (await settled(service, "small")).state == (await settled(service, "twin")).state == "host"
        await admin.change("unload", "small")
        await gone(service, "small")
        twin = (await statuses(service))["twin"]
        assert twin.is_pinned and twin.state == "host"

    run(work())


def test_a_folder_has_one_name_however_it_is_written(service: AdapterService) -> None:
    async def work() -> None:
        adapters = [await service.find(ref(name)) for name in ("small", "small/.", "./small", "small//")]
        assert {(adapter.adapter_id, adapter.version) for adapter in adapters} == {("small", adapters[0].version)}
        assert set(await statuses(service)) == {"small"}

    run(work())


@pytest.mark.parametrize("action", ["unload", "unpin"])
def test_what_admins_take_back_while_it_loads_is_taken_back(service: AdapterService, store: Store, action: str) -> None:
    async def work() -> None:
        admin = ReplicaAdmin(service)
        store.held = "small"
        await admin.change("load", "small", is_pinned=True)
        await admin.change(action, "small")
        store.door.set()
        while service._tasks:
            await asyncio.sleep(0.01)
        known = (await statuses(service)).get("small")
        assert not (known and known.is_pinned) and (action == "unpin" or not (known and known.host_bytes))

    run(work())


@pytest.mark.parametrize("is_pinned", [True, False])
def test_a_load_that_an_unload_and_another_load_have_overtaken_loads_nothing(
    service: AdapterService, steps: RankInProcess, root: Path, is_pinned: bool
) -> None:
    async def work() -> None:
        admin = ReplicaAdmin(service)
        for _ in range(adapter_service.NUM_LOADS):
            await service._loads.acquire()
        await admin.change("load", "small", is_pinned)
        while not (old := (await statuses(service))["small"].version):
            await asyncio.sleep(0.01)
        await admin.change("unload", "small")
        save_folder(root / "small", 8, seed=1)
        await admin.change("load", "small", is_pinned)
        while (new := (await statuses(service))["small"].version) in ("", old):
            await asyncio.sleep(0.01)
        for _ in range(adapter_service.NUM_LOADS):
            service._loads.release()
        while service._tasks:
            await asyncio.sleep(0.01)
        status = (await statuses(service))["small"]
        assert (status.version, status.state, status.is_pinned) == (new, "host", is_pinned)
        assert len(steps.prepared) == 1

    run(work())


def test_one_that_is_wanted_again_before_it_has_left_stays(service: AdapterService, store: Store) -> None:
    async def work() -> None:
        admin = ReplicaAdmin(service)
        await admin.change("load", "small")
        await settled(service, "small")
        adapter = await service.find(ref("small"))
        tiers_adapter = await service._ask(lambda tiers: tiers.table.acquire(adapter))
        await admin.change("unload", "small")
        await admin.change("load", "small", is_pinned=True)
        assert (await settled(service, "small")).is_pinned
        await service._ask(lambda tiers: (tiers.table.release(tiers_adapter), tiers.free_unused(tiers_adapter)))
        status = (await statuses(service))["small"]
        assert (status.state, status.is_pinned, status.host_bytes) == ("host", True, PAGE_BYTES) and not store.removed
        assert not service._unloading and len(await service.statuses()) == 1, "nothing is unloading any more"

    run(work())


def test_a_pin_holds_for_the_next_version_too(service: AdapterService, root: Path) -> None:
    async def work() -> None:
        admin = ReplicaAdmin(service)
        await admin.change("load", "small", is_pinned=True)
        await settled(service, "small")
        save_folder(root / "small", 8, seed=1)
        adapter = await service.find(ref("small"))
        while service._tasks:
            await asyncio.sleep(0.01)
        status = (await statuses(service))["small"]
        assert status.version == adapter.version and status.is_pinned

    run(work())


def test_a_late_search_does_not_bring_back_an_old_version(service: AdapterService, store: Store, root: Path) -> None:
    async def work() -> None:
        store.held = "small"
        late = asyncio.create_task(service.find(ref("small")))
        await asyncio.sleep(0.05)
        store.held = ""
        new = await service.find(ref("small"))
        save_folder(root / "small", 8, seed=1)
        store.door.set()
        await late
        assert (await statuses(service))["small"].version == new.version

    run(work())


def test_only_what_nobody_wants_is_forgotten(service: AdapterService, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter_uses, "MAX_REMEMBERED", 3)
    for i in range(8):
        save_folder(root / f"a{i}", 4, seed=i)

    async def work() -> None:
        admin = ReplicaAdmin(service)
        await admin.change("load", "small", is_pinned=True)
        await settled(service, "small")
        for i in range(8):
            await service.find(ref(f"a{i}"))
        known = await statuses(service)
        assert len(known) == 3 and known["small"].is_pinned

    run(work())


def test_one_more_is_served_when_all_that_are_remembered_have_to_be(service: AdapterService, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter_uses, "MAX_REMEMBERED", 1)

    async def work() -> None:
        admin = ReplicaAdmin(service)
        await admin.change("load", "small")
        await settled(service, "small")
        assert (await service.find(ref("large"))).rank == 16
        assert set(await statuses(service)) == {"small", "large"}
        await service.find(ref("huge"))
        assert set(await statuses(service)) == {"small", "huge"}, "what nobody has to know went"

    run(work())


def test_of_too_many_the_least_recently_used_is_forgotten(service: AdapterService, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter_uses, "MAX_REMEMBERED", 2)

    async def work() -> None:
        for name in ("small", "large", "small", "huge"):
            await service.find(ref(name))
        assert set(await statuses(service)) == {"small", "huge"}

    run(work())


def test_what_has_a_running_request_is_not_forgotten(service: AdapterService, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter_uses, "MAX_REMEMBERED", 1)

    async def work() -> None:
        with service.counted(ref("small"), await service.find(ref("small"))):
            await service.find(ref("large"))
            assert (await statuses(service))["small"].num_running == 1

    run(work())


def test_a_new_adapter_costs_the_same_however_many_are_remembered(service: AdapterService, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter_uses, "MAX_REMEMBERED", 50)
    looked_at: list[AdapterUse] = []
    record_of = service._wishes.of

    def counted_record(use: AdapterUse) -> AdapterRecord | None:
        looked_at.append(use)
        return record_of(use)

    monkeypatch.setattr(service._wishes, "of", counted_record)
    refs = [ref(f"a{i}") for i in range(100)]
    service._wishes.records = {
        each.adapter_id: AdapterRecord(ref=each, is_loaded=True, is_pinned=False, generation=1, number=1) for each in refs
    }
    for each in refs:
        service._use(each)
    looked_at.clear()
    service._use(ref("new"))
    assert 0 < len(looked_at) <= adapter_uses.NUM_LOOKED_AT
    for i in range(100):
        service._use(ref(f"b{i}"))
    assert len(service._uses) < 120, "those that have to be remembered don't keep the others from being forgotten"


def test_the_engine_is_asked_about_few_adapters_between_two_steps(
    service: AdapterService, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapter_report, "NUM_AT_ONCE", 2)
    asked: list[int] = []
    places = AdapterTiers.places

    def counted_places(tiers: AdapterTiers, versions: Collection[str]) -> dict[str, AdapterPlace]:
        asked.append(len(versions))
        return places(tiers, versions)

    async def work() -> dict[str, AdapterStatus]:
        await service.preload(["small", "large"])
        for i in range(3):
            save_folder(root / f"a{i}", 4, seed=i)
            await service.find(ref(f"a{i}"))
        monkeypatch.setattr(AdapterTiers, "places", counted_places)
        return await statuses(service)

    known = run(work())
    assert asked == [2, 2, 1]
    assert {name: status.state for name, status in known.items()} == {
        "small": "host",
        "large": "host",
        **dict.fromkeys(("a0", "a1", "a2"), "known"),
    }


@pytest.mark.parametrize("name", ["small", "./small", "large/../small"])
def test_a_new_replica_unloads_what_it_has_preloaded_and_others_have_unloaded(store: Store, engine: Engine, name: str) -> None:
    records = AdapterSet()
    records.change(AdapterChange(action="unload", ref=ref("small")))

    async def work() -> dict[str, AdapterStatus]:
        await asyncio.sleep(0.01)
        service = AdapterService(store, engine, max_waiting=2, page_bytes=PAGE_BYTES)
        await service.preload([name, "large"])
        await service.apply(msgspec.msgpack.encode(records.snapshot()))
        await gone(service, "small")  # as it is written there
        return await statuses(service)

    assert run(work()).keys() == {"large"}


def test_a_new_replica_leaves_alone_what_others_have_unloaded(store: Store, engine: Engine) -> None:
    records = AdapterSet()
    records.change(AdapterChange(action="unload", ref=ref("small")))

    async def work() -> None:
        await asyncio.sleep(0.01)
        service = AdapterService(store, engine, max_waiting=2, page_bytes=PAGE_BYTES)
        await service.apply(msgspec.msgpack.encode(records.snapshot()))
        assert not store.removed
        await asyncio.sleep(0.01)
        records.change(AdapterChange(action="unload", ref=ref("large")))
        await service.apply(msgspec.msgpack.encode(records.snapshot()))
        assert store.removed == ["large"]

    run(work())


def test_a_pin_that_failed_is_not_tried_again_once_it_is_taken_back(service: AdapterService, root: Path) -> None:
    async def work() -> None:
        admin = ReplicaAdmin(service)
        (root / "small").rename(root.parent / "away")
        pinned = (await admin.change("pin", "small")).record
        await settled(service, "small")
        await admin.change("unpin", "small")
        while service._tasks:
            await asyncio.sleep(0.01)
        assert (await statuses(service))["small"].state == "failed"
        service._load_again(pinned)  # as it does when its time has come
        assert not service._tasks

    run(work())


def test_what_could_not_be_deleted_from_disk_is_not_listed_as_unloading_for_ever(
    service: AdapterService, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(ref: AdapterRef, path: str = "") -> None:
        raise OSError("no space left")

    async def work() -> None:
        monkeypatch.setattr(store, "remove", full)
        await service.load(ref("small"))
        await ReplicaAdmin(service).change("unload", "small")
        await gone(service, "small")

    run(work())


def test_a_load_that_fails_and_is_taken_back_leaves_a_request_that_runs_in_the_list(service: AdapterService, root: Path) -> None:
    async def work() -> None:
        admin = ReplicaAdmin(service)
        adapter = await service.find(ref("small"))
        await admin.change("unload", "small")
        await gone(service, "small")
        with service.counted(ref("small"), adapter):  # it was found before
            (root / "small").rename(root.parent / "away")
            changed = await admin.change("load", "small")
            assert (await settled(service, "small")).state == "failed"
            await admin.undo(changed)
            assert (await statuses(service))["small"].num_running == 1

    run(work())


def test_what_is_being_loaded_is_not_forgotten(service: AdapterService, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter_uses, "MAX_REMEMBERED", 1)

    async def work() -> None:
        store.held = "large"
        loading = asyncio.create_task(service.load(ref("large")))
        await asyncio.sleep(0)
        await service.find(ref("small"))
        assert (await statuses(service))["large"].state == "loading"
        store.door.set()
        await loading
        assert (await statuses(service))["large"].state == "host"

    run(work())


def test_a_pin_of_one_of_many_names_of_a_folder_outlives_those_of_the_others(service: AdapterService, root: Path) -> None:
    for name in ("one", "two"):
        (root / name).symlink_to(root / "small")

    async def work() -> None:
        admin = ReplicaAdmin(service)
        await admin.change("load", "one", is_pinned=True)
        await admin.change("load", "small", is_pinned=True)
        await admin.change("load", "two")
        for name in ("one", "small", "two"):
            await settled(service, name)
        await admin.change("unpin", "small")
        for name in ("one", "small", "two"):
            assert (await settled(service, name)).is_pinned, "the first name's pin holds for the folder"

    run(work())


def test_a_link_that_leads_elsewhere_leaves_no_pin_on_what_another_id_has_loaded(service: AdapterService, root: Path) -> None:
    async def work() -> None:
        admin = ReplicaAdmin(service)
        (root / "latest").symlink_to(root / "small")
        await admin.change("load", "small")
        await admin.change("load", "latest", is_pinned=True)
        await settled(service, "latest")
        assert (await settled(service, "small")).is_pinned, "they are the same"
        (root / "latest").unlink()
        (root / "latest").symlink_to(root / "large")
        await service.find(ref("latest"))
        while (await statuses(service))["small"].is_pinned or not (await statuses(service))["latest"].is_pinned:
            await asyncio.sleep(0.01)

    run(work())


def test_what_another_id_has_pinned_can_be_unpinned_by_its_own(service: AdapterService, root: Path) -> None:
    async def work() -> None:
        admin = ReplicaAdmin(service)
        (root / "latest").symlink_to(root / "small")
        for name in ("latest", "small"):
            await admin.change("load", name, is_pinned=True)
            await settled(service, name)
        await admin.change("unpin", "small")
        assert (await statuses(service))["small"].is_pinned, "the other still wants it"
        await admin.change("unpin", "latest")
        assert not (await statuses(service))["small"].is_pinned

    run(work())
