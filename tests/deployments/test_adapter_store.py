import json
import logging
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from loray.deployments import adapter_readers, adapter_store, remembered_failures
from loray.deployments.adapter_merging import MERGE_BYTES
from loray.deployments.adapter_room import ANY_ROOM, AdapterRoom
from loray.deployments.adapter_sources import Offer
from loray.deployments.adapter_store import AdapterStore
from loray.deployments.adapters import Adapter
from loray.deployments.config import AdapterArgs
from loray.deployments.disk_cache import DiskCache
from loray.deployments.errors import AdapterChanged, AdapterFailed, AdapterNotFound, InvalidRequest, Overloaded, SourceFailed
from loray.deployments.request import AdapterRef, MergeRecipe
from loray.models.adapter_config import CONFIG_FILE, FilesChanged
from tests.deployments.file_server import FileServer, Handler, Hold, HubServer
from tests.deployments.merging_here import merge_ref, merging
from tests.deployments.peft_folder import OTHER_SHAPES, SHAPES, save_folder

pytestmark = pytest.mark.slow  # downloads

WEIGHTS = "adapter_model.safetensors"
UNKNOWN = "hf_unknown"


class Hub(HubServer):
    """As huggingface.co: refuses a token that it does not know also what everybody may read. Fails for all others while it is away."""

    is_away = False

    def answer(self, handler: Handler) -> None:
        if self._token(handler) == UNKNOWN:
            return handler.reply(401, X_Error_Message="Invalid credentials in Authorization header")
        return handler.reply(503) if self.is_away else super().answer(handler)


class World:
    """A hub, a web server, a root of local folders, and stores that read from them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in ("hub/org", "web", "local"):
            (folder / name).mkdir(parents=True)
        self.hub = Hub(folder / "hub")
        self.web = FileServer(folder / "web")
        save_folder(folder / "hub" / "org" / "small", rank=4)

    def store(self, room: AdapterRoom = ANY_ROOM, **changes: Any) -> AdapterStore:
        args = {"local_roots": [self.folder / "local"], "allowed_urls": [self.web.url], **changes}
        return AdapterStore(AdapterArgs(**args), SHAPES, self.folder / "cache", room)

    def on_web(self, name: str, rank: int = 4, seed: int = 0) -> AdapterRef:
        save_folder(self.folder / "web" / name, rank, seed)
        return AdapterRef(adapter_id=f"{self.web.url}/{name}")

    def hold(self, name: str) -> tuple[threading.Event, threading.Event]:
        """The weights' download stops: when it has come (the first event) until it is let go (the second)."""
        self.web.rules[f"/{name}/{WEIGHTS}"] = hold = Hold()
        return hold.held, hold.released

    def close(self) -> None:
        self.hub.close()
        self.web.close()


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    made = World(tmp_path)
    made.hub.stand_in(monkeypatch, tmp_path / "hf")
    yield made
    made.close()


HUB = AdapterRef(adapter_id="org/small", source="hub")


def with_token(token: str) -> AdapterRef:
    return AdapterRef(adapter_id="org/small", source="hub", api_token=token)


def test_equal_content_is_one_version_wherever_it_comes_from(world: World) -> None:
    save_folder(world.folder / "local" / "small", rank=4)
    store = world.store()
    found = [store.find(ref) for ref in (HUB, world.on_web("small"), AdapterRef(adapter_id="small"))]
    assert len({adapter.version for adapter in found}) == 1 and len({adapter.path for adapter in found}) == 3
    assert [adapter.adapter_id for adapter in found] == ["org/small", f"{world.web.url}/small", "small"]
    assert {adapter.num_pages for adapter in found} == {1}


def test_a_second_find_and_a_restart_download_nothing(world: World) -> None:
    ref = world.on_web("small")
    first = world.store().find(ref)
    num_requests = len(world.web.requests)
    again = world.store()
    assert (again.find(ref).path, again.find(ref).version) == (first.path, first.version)
    assert len(world.web.requests) == num_requests


@pytest.mark.parametrize(
    "spoil", [lambda file: file.write_bytes(file.read_bytes()[:-1]), lambda file: flip(file), lambda file: file.unlink()]
)
@pytest.mark.parametrize("restarts", [True, False])
def test_a_file_that_was_cut_changed_or_lost_on_disk_is_fetched_anew(world: World, spoil: Callable[[Path], Any], restarts: bool) -> None:
    ref = world.on_web("small")
    store = world.store()
    first = store.find(ref)
    spoil(Path(first.path) / WEIGHTS)
    again = (world.store() if restarts else store).find(ref)
    assert again.version == first.version
    assert (Path(again.path) / WEIGHTS).read_bytes() == (world.folder / "web" / "small" / WEIGHTS).read_bytes()


def flip(file: Path) -> None:
    """One bit of a weight, which no header and no size shows."""
    body = bytearray(file.read_bytes())
    body[-1] ^= 1
    file.write_bytes(body)


@pytest.mark.parametrize("source", ["hub", "web"])
def test_after_forget_new_content_is_a_new_version_and_the_old_files_stay(world: World, source: str) -> None:
    ref = HUB if source == "hub" else world.on_web("small")
    store = world.store()
    old = store.find(ref)
    save_folder(world.folder / ("hub/org" if source == "hub" else "web") / "small", rank=4, seed=1)
    assert store.find(ref).version == old.version
    store.forget(ref)
    new = store.find(ref)
    assert new.version != old.version and Path(old.path).is_dir() and new.path != old.path
    assert world.store().find(ref).version == new.version


def replaced_while_read(world: World, store: AdapterStore, ref: AdapterRef) -> Adapter:
    """Its weights are on their way when its owner replaces it."""
    held, released = world.hold("small")
    with ThreadPoolExecutor(1) as thread:
        finding = thread.submit(store.find, ref)
        assert held.wait(60)
        world.on_web("small", rank=8, seed=1)
        world.web.rules.clear()
        released.set()
        return finding.result(60)


@pytest.mark.parametrize("tells_digests", [False, True])
@pytest.mark.parametrize("is_known", [False, True])
def test_what_is_replaced_while_it_is_read_is_read_once_more(world: World, tells_digests: bool, is_known: bool) -> None:
    store, ref = world.store(), world.on_web("small")
    world.web.tells_digests = tells_digests
    if is_known:
        store.find(ref)
        world.on_web("small", seed=2)
        store.forget(ref)
    found = replaced_while_read(world, store, ref)
    assert found.rank == 8 and not found.unrenewed
    assert (Path(found.path) / WEIGHTS).read_bytes() == (world.folder / "web" / "small" / WEIGHTS).read_bytes()


class TakenAway:
    """A rule: its owner deletes it, before he uploads it anew, when this is asked for the nth time."""

    def __init__(self, folder: Path, method: str, nth: int) -> None:
        self._places, self._method, self._num_left = [folder, folder.with_name("away")], method, nth

    def __call__(self, handler: Handler) -> bool:
        self._num_left -= handler.command == self._method
        if self._num_left == 0:
            self._num_left = -1
            shutil.move(*self._places)
        return False

    def undo(self) -> None:
        shutil.move(*reversed(self._places))


@pytest.mark.parametrize(
    ("source", "method", "name", "nth"),
    [
        ("web", "GET", CONFIG_FILE, 1),
        ("web", "GET", WEIGHTS, 1),
        ("web", "HEAD", CONFIG_FILE, 2),  # after its weights
        ("web", "HEAD", CONFIG_FILE, 3),  # when it is described once more, since it was replaced first
        ("hub", "HEAD", CONFIG_FILE, 1),
        ("hub", "HEAD", WEIGHTS, 1),
        ("private", "HEAD", CONFIG_FILE, 1),
        ("private", "HEAD", WEIGHTS, 1),
    ],
)
def test_what_is_gone_for_a_moment_while_it_is_read_is_served_on(world: World, source: str, method: str, name: str, nth: int) -> None:
    store, ref = world.store(), world.on_web("small") if source == "web" else with_token("hf_one")
    server, place = (world.web, "small") if source == "web" else (world.hub, "org/small")
    if source == "private":
        world.hub.readers[place] = {"hf_one"}
    old = store.find(ref)
    save_folder(server.root / place, rank=4, seed=1)

    def replace(handler: Handler) -> bool:
        if handler.command == "GET":
            save_folder(server.root / place, rank=4, seed=2)
        return False

    if nth == 3:
        server.rules[f"/{place}/{WEIGHTS}"] = replace
    folder = place if source == "web" else f"{place}/resolve/{world.hub.commit(place)}"
    server.rules[f"/{folder}/{name}"] = taken_away = TakenAway(server.root / place, method, nth)
    store.forget(ref)
    found = store.find(ref)
    assert found.version == old.version and "but was a moment ago" in found.unrenewed
    server.rules.clear()
    taken_away.undo()
    store.forget(ref)
    assert store.find(ref).version != old.version


def test_what_is_gone_while_it_is_described_is_not_for_readers_alone(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter_store, "get_token", lambda: "hf_server")
    store = world.store(default_source="hub")
    store.find(HUB)
    taken_away = TakenAway(world.hub.root / "org" / "small", "HEAD", 1)
    world.hub.rules[f"/org/small/resolve/main/{CONFIG_FILE}"] = taken_away
    store.forget(HUB)
    with pytest.raises(AdapterNotFound):
        store.find(HUB)
    taken_away.undo()
    store.forget(HUB)
    assert not store.find(HUB).is_private and store.names() == ["org/small"]


@pytest.mark.parametrize("spoil", [lambda file: os.truncate(file, 500), flip])
@pytest.mark.parametrize("is_reload", [False, True])
def test_a_broken_download_is_not_in_the_way_of_its_next(world: World, is_reload: bool, spoil: Callable[[Path], Any]) -> None:
    ref, other = world.on_web("small"), world.on_web("other", seed=3)
    size = sum(file.stat().st_size for file in (world.folder / "web" / "small").iterdir())
    store = world.store(disk_bytes=2.5 * size)
    found = store.find(ref)
    store.hold(store.find(other).path)
    spoil(Path(found.path) / WEIGHTS)
    if is_reload:
        world.on_web("small", seed=1)
        store.forget(ref)
    assert not store.find(ref).unrenewed


def test_what_another_servers_base_model_cannot_use_is_left_to_who_can(world: World) -> None:
    """They share a disk; one reloads it in vain."""
    store, ref = world.store(), world.on_web("small")
    other = AdapterStore(AdapterArgs(allowed_urls=[world.web.url]), OTHER_SHAPES, world.folder / "cache")
    version = store.find(ref).version
    world.on_web("small", seed=1)
    other.forget(ref)
    with pytest.raises(AdapterFailed, match="shape"):
        other.find(ref)
    world.web.close()
    assert store.find(ref).version == version


def test_what_changes_whenever_it_is_read_is_refused_for_a_while(world: World) -> None:
    ref, seeds = world.on_web("small"), iter(range(1, 100))

    def change(handler: Handler) -> bool:
        if handler.command == "GET":
            world.on_web("small", seed=next(seeds))
        return False

    world.web.rules[f"/small/{WEIGHTS}"] = change
    store = world.store()
    for _ in range(2):
        with pytest.raises(AdapterFailed, match="small' was changed while it was read, 3 times; try again later"):
            store.find(ref)
    assert world.web.num_gets(f"small/{WEIGHTS}") == 3


def test_what_is_forgotten_during_its_first_download_is_asked_for_anew_after_it(world: World) -> None:
    ref = world.on_web("small")
    held, released = world.hold("small")
    store = world.store()
    with ThreadPoolExecutor(1) as thread:
        finding = thread.submit(store.find, ref)
        assert held.wait(60)
        store.forget(ref)
        released.set()
        old = finding.result(60)
    world.on_web("small", seed=1)
    assert store.find(ref).version != old.version


def test_after_forget_equal_content_is_not_downloaded_again(world: World) -> None:
    store = world.store()
    first = store.find(HUB)
    num_gets = world.hub.num_gets(WEIGHTS)
    store.forget(HUB)
    assert store.find(HUB).path == first.path and world.hub.num_gets(WEIGHTS) == num_gets


def test_after_forget_what_is_on_disk_is_served_on_when_its_source_is_away(world: World, caplog: pytest.LogCaptureFixture) -> None:
    ref = world.on_web("small")
    store = world.store()
    old = store.find(ref)
    world.on_web("small", seed=1)
    store.forget(ref)
    world.web.rules["/small/adapter_config.json"] = lambda handler: handler.reply(500) is None
    for _ in range(2):
        found = store.find(ref)
        assert found.version == old.version and "answered 500" in found.unrenewed
    assert [record.levelname for record in caplog.records if "answered 500" in record.getMessage()] == ["WARNING"], "it was asked once"
    world.web.rules.clear()
    store.forget(ref)
    new = store.find(ref)
    assert new.version != old.version and not new.unrenewed


def test_after_forget_what_its_source_has_no_more_is_not_served(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remembered_failures, "FAILURE_S", 1e-9)
    ref = world.on_web("small")
    store = world.store()
    store.find(ref)
    (world.folder / "web" / "small").rename(world.folder / "web" / "gone")
    store.forget(ref)
    for _ in range(2):
        with pytest.raises(AdapterNotFound):
            store.find(ref)
    assert not store.names() and not world.store().names()
    with pytest.raises(AdapterNotFound):
        world.store().find(ref)
    (world.folder / "web" / "gone").rename(world.folder / "web" / "small")
    assert store.find(ref).num_pages == 1


def test_what_has_become_private_is_after_a_reload_for_its_readers_alone_in_later_processes_too(world: World) -> None:
    store = world.store(default_source="hub")
    assert not store.find(HUB).is_private and store.names() == ["org/small"]
    world.hub.readers["org/small"] = {"hf_one"}
    store.forget(HUB)
    with pytest.raises(AdapterNotFound):
        store.find(HUB)
    later = world.store(default_source="hub")
    assert not store.names() and not later.names()
    with pytest.raises(AdapterNotFound):
        later.find(HUB)
    assert later.find(with_token("hf_one")).is_private
    num_gets = world.hub.num_gets(WEIGHTS)
    store.forget(HUB)
    with pytest.raises(AdapterNotFound):
        store.find(with_token("hf_bad"))
    assert store.find(with_token("hf_one")).is_private and world.hub.num_gets(WEIGHTS) == num_gets, (
        "a stranger takes nothing from its readers"
    )


@pytest.mark.parametrize("is_away", [False, True])
def test_a_token_that_the_hub_does_not_know_takes_from_nobody_what_all_may_read(world: World, is_away: bool) -> None:
    store = world.store(default_source="hub")
    old = store.find(HUB)
    save_folder(world.folder / "hub" / "org" / "small", rank=4, seed=1)
    store.forget(HUB)
    world.hub.is_away = is_away
    found = store.find(with_token(UNKNOWN))
    assert (found.version == old.version) == bool(found.unrenewed) == is_away
    world.hub.is_away = True
    for each in (store, world.store(default_source="hub")):
        assert each.find(HUB).version == found.version and each.names() == ["org/small"]


def test_a_servers_token_that_the_hub_does_not_know_keeps_from_nobody_what_all_may_read(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.store().find(HUB)
    monkeypatch.setattr(adapter_store, "get_token", lambda: UNKNOWN)
    save_folder(world.folder / "hub" / "org" / "small", rank=4, seed=1)
    later = world.store(default_source="hub")
    later.forget(HUB)
    found = later.find(HUB)
    world.hub.is_away = True
    later.forget(HUB)
    assert later.find(HUB).version == found.version and later.names() == ["org/small"]


def test_a_public_adapter_is_downloaded_for_a_token_that_the_hub_does_not_know(world: World) -> None:
    """OpenAI's client always sends one: whatever its user has made up."""
    store, ref = world.store(), AdapterRef(adapter_id="org/small", source="hub", api_token=UNKNOWN)
    assert store.find(ref).adapter_id == "org/small" and not store.is_private(ref)


def test_what_has_become_public_is_served_to_a_token_that_the_hub_does_not_know(world: World) -> None:
    world.hub.readers["org/small"] = {"hf_one"}
    store = world.store()
    version = store.find(with_token("hf_one")).version
    with pytest.raises(AdapterNotFound):
        store.find(with_token("hf_two"))
    del world.hub.readers["org/small"]
    assert store.find(with_token(UNKNOWN)).version == version
    store.forget(HUB)
    assert not store.find(HUB).is_private and not store.is_private(HUB)


def test_who_learns_that_it_is_private_says_so_of_what_another_has_fetched_meanwhile(world: World) -> None:
    first, second = world.store(), world.store()
    first.find(HUB)
    world.hub.rules["/api/models/org/small?blobs=true"] = hold = Hold()
    first.forget(HUB)
    with ThreadPoolExecutor(1) as thread:
        reading = thread.submit(first.find, with_token("hf_one"))
        assert hold.held.wait(60)
        world.hub.rules.clear()
        save_folder(world.folder / "hub" / "org" / "small", rank=4, seed=1)
        second.forget(HUB)
        version = second.find(HUB).version
        world.hub.readers["org/small"] = {"hf_one"}
        save_folder(world.folder / "hub" / "org" / "small", rank=4, seed=2)
        weights = f"/org/small/resolve/{world.hub.commit('org/small')}/{WEIGHTS}"
        world.hub.rules[weights] = lambda handler: handler.reply(500) is None  # whatever becomes of the download
        hold.released.set()
        found = reading.result(60)
    assert found.version == version and found.is_private
    for store in (first, second):
        with pytest.raises(AdapterNotFound):
            store.find(HUB)


def test_a_refusal_is_not_forgotten_for_a_download_that_was_offered_before(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remembered_failures, "FAILURE_S", 1e-9)
    store = world.store(default_source="hub")
    store.find(HUB)
    save_folder(world.folder / "hub" / "org" / "small", rank=4, seed=1)
    world.hub.rules[f"/org/small/resolve/{world.hub.commit('org/small')}/{WEIGHTS}"] = hold = Hold()
    store.forget(HUB)
    with ThreadPoolExecutor(2) as threads:
        good = threads.submit(store.find, with_token("hf_one"))
        assert hold.held.wait(60)
        world.hub.readers["org/small"] = {"hf_one"}
        number = store._stale[store.place_key(HUB)]
        refused = threads.submit(store.find, HUB)
        while store._stale[store.place_key(HUB)] == number:
            time.sleep(0.01)
        hold.released.set()
        assert not good.result(60).is_private
        with pytest.raises(AdapterNotFound):
            refused.result(60)
    with pytest.raises(AdapterNotFound):
        store.find(with_token("hf_two"))
    assert store.find(with_token("hf_one")).is_private and not store.names()


@pytest.mark.parametrize("becomes_private", [True, False])
def test_what_a_source_has_said_last_of_who_may_read_it_counts(world: World, becomes_private: bool) -> None:
    """One process was told before and acts after another was told otherwise."""
    readers = {"org/small": {"hf_one"}}
    world.hub.readers = {} if becomes_private else readers
    late, other = world.store(), world.store()
    late.find(with_token("hf_one"))
    described, go_on, fetch = threading.Event(), threading.Event(), late._fetch

    def fetch_late(*offered: Any) -> Adapter:
        described.set()
        assert go_on.wait(60)
        return fetch(*offered)

    late._fetch = fetch_late  # type: ignore[method-assign]
    for store in (late, other):
        store.forget(HUB)
    with ThreadPoolExecutor(1) as thread:
        finding = thread.submit(late.find, with_token("hf_one"))
        assert described.wait(60)
        world.hub.readers = readers if becomes_private else {}
        assert other.find(with_token("hf_one")).is_private == becomes_private
        go_on.set()
        assert finding.result(60).is_private == becomes_private
    assert late.is_private(HUB) == other.is_private(HUB) == becomes_private


def test_a_token_that_is_refused_for_files_alone_keeps_from_nobody_what_all_may_read(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = world.hub.answer

    def refuse(handler: Handler) -> None:
        if "/resolve/" in handler.path and world.hub._token(handler) == "hf_odd":
            return handler.reply(401, X_Error_Message="Invalid credentials in Authorization header")
        return answer(handler)

    monkeypatch.setattr(world.hub, "answer", refuse)
    assert not world.store().find(with_token("hf_odd")).is_private


@pytest.mark.parametrize("is_gone", [False, True])
def test_what_is_not_for_everybody_any_more_is_gone_from_disk_whoever_asks_first(world: World, is_gone: bool) -> None:
    store = world.store(default_source="hub")
    store.find(HUB)
    if is_gone:
        shutil.rmtree(world.folder / "hub" / "org" / "small")
    else:
        world.hub.readers["org/small"] = {"hf_one"}
    store.forget(HUB)
    with pytest.raises(AdapterNotFound):
        store.find(with_token(UNKNOWN))
    assert store.disk_bytes(HUB) == 0 and not world.store(default_source="hub").names()


@pytest.mark.parametrize("token", ["", UNKNOWN])
def test_a_new_version_that_comes_while_another_is_refused_stays(world: World, token: str) -> None:
    store = world.store(default_source="hub")
    old = store.find(HUB)
    save_folder(world.folder / "hub" / "org" / "small", rank=4, seed=1)
    world.hub.rules[f"/org/small/resolve/{world.hub.commit('org/small')}/{WEIGHTS}"] = hold = Hold()

    is_refused = threading.Event()

    def refuse_who_has_no_token(handler: Handler) -> bool:
        if world.hub._token(handler):
            return False
        is_refused.set()
        handler.reply(401, X_Error_Code="RepoNotFound")
        return True

    world.hub.rules["/api/models/org/small?blobs=true"] = refuse_who_has_no_token
    store.forget(HUB)
    with ThreadPoolExecutor(2) as threads:
        good = threads.submit(store.find, with_token("hf_one"))
        assert hold.held.wait(60)
        refused = threads.submit(store.find, with_token(token))
        assert is_refused.wait(60)
        hold.released.set()
        new = good.result(60)
        with pytest.raises(AdapterNotFound):
            refused.result(60)
    for each in (store, world.store(default_source="hub")):
        assert each.find(with_token("hf_one")).version == new.version != old.version and each.names() == ["org/small"]
    assert world.hub.num_gets(WEIGHTS) == 2


def test_after_forget_what_is_private_is_served_on_to_its_readers_alone_when_the_hub_is_away(world: World) -> None:
    world.hub.readers["org/small"] = {"hf_one"}
    store = world.store()
    store.find(with_token("hf_one"))
    store.find(with_token("hf_one"))
    store.forget(HUB)
    for path in ("/api/models/org/small?blobs=true", "/org/small/resolve/main/adapter_config.json"):
        world.hub.rules[path] = lambda handler: handler.reply(500) is None
    with pytest.raises(AdapterFailed, match="500"):
        store.find(with_token("hf_bad"))
    assert store.find(with_token("hf_one")).num_pages == 1
    with pytest.raises(AdapterFailed, match="500"):
        store.find(with_token("hf_bad"))


def test_a_hub_that_fails_is_not_asked_again_for_every_token(world: World) -> None:
    path = "/api/models/org/small?blobs=true"
    world.hub.rules[path] = lambda handler: handler.reply(503) is None
    store = world.store()
    for token in ("hf_one", "hf_two", ""):
        with pytest.raises(SourceFailed, match="503"):
            store.find(with_token(token))
    num_requests = len(world.hub.requests)
    with pytest.raises(SourceFailed, match="503"):
        store.find(with_token("hf_three"))
    assert len(world.hub.requests) == num_requests
    del world.hub.rules[path]
    store.forget(HUB)
    assert store.find(with_token("hf_one")).num_pages == 1


def test_what_fails_for_one_token_is_asked_for_with_another(world: World) -> None:
    world.hub.readers["org/small"] = {"hf_one"}
    store = world.store()
    with pytest.raises(AdapterNotFound):
        store.find(with_token("hf_bad"))
    assert store.find(with_token("hf_one")).num_pages == 1


def test_what_is_removed_while_it_is_downloaded_does_not_stay(world: World) -> None:
    held, released = world.hold("small")
    store, ref = world.store(), world.on_web("small")
    with ThreadPoolExecutor(2) as threads:
        found = threads.submit(store.find, ref)
        assert held.wait(60)
        removed = threads.submit(store.remove, ref)
        released.set()
        assert found.result(60).num_pages == 1
        removed.result(60)
    assert store.disk_bytes(ref) == 0


def test_what_is_removed_while_its_source_is_asked_does_not_stay_either(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    store, ref = world.store(), world.on_web("small")
    asked, door = threading.Event(), threading.Event()
    source = store._sources["https"]
    describe = source.describe

    def describe_late(*args: Any) -> Offer:
        asked.set()
        assert door.wait(60)
        return describe(*args)

    monkeypatch.setattr(source, "describe", describe_late)
    with ThreadPoolExecutor(2) as threads:
        found = threads.submit(store.find, ref)
        assert asked.wait(60)
        removed = threads.submit(store.remove, ref)
        with pytest.raises(TimeoutError):
            removed.result(0.3)
        door.set()
        assert found.result(60).num_pages == 1
        removed.result(60)
    assert store.disk_bytes(ref) == 0


def test_files_beside_an_adapter_do_not_count_for_its_merges(world: World) -> None:
    save_folder(world.folder / "local" / "one", rank=4)
    (world.folder / "local" / "one" / "gone").symlink_to("nowhere")
    with open(world.folder / "local" / "one" / "optimizer.pt", "wb") as file:
        file.truncate(1 << 41)
    store = world.store()
    store.merge = lambda folders, weights, method, shapes, out: shutil.copytree(folders[0], out, ignore=lambda *_: ["gone", "optimizer.pt"])
    part = store.find(AdapterRef(adapter_id="one"))
    assert store.merged(merge_ref("merge", "one", weights=(0.5,)), [part]).num_pages == 1


def test_threads_and_processes_that_want_one_adapter_download_it_once(world: World) -> None:
    ref = world.on_web("small")
    second = threading.Event()

    def wait_for_a_second(handler: Handler) -> bool:
        if handler.command == "GET" and world.web.num_gets(WEIGHTS) > 1:
            second.set()
        elif handler.command == "GET":
            second.wait(1)  # it must not come
        return False

    world.web.rules[f"/small/{WEIGHTS}"] = wait_for_a_second
    stores = [world.store() for _ in range(2)]
    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(lambda i: stores[i % 2].find(ref), range(8)))
    assert len({adapter.path for adapter in found}) == 1
    assert world.web.num_gets(WEIGHTS) == 1


def test_threads_that_want_one_missing_adapter_ask_for_it_once(world: World) -> None:
    second = threading.Event()

    def wait_for_a_second(handler: Handler) -> bool:
        if world.web.requests.count(("HEAD", handler.path)) > 1:
            second.set()
        elif handler.command == "HEAD":
            second.wait(1)  # it must not come
        return False

    world.web.rules["/none/adapter_config.json"] = wait_for_a_second
    store, ref = world.store(), AdapterRef(adapter_id=f"{world.web.url}/none")
    with ThreadPoolExecutor(8) as threads:
        errors = [finding.exception() for finding in [threads.submit(store.find, ref) for _ in range(8)]]
    assert all(isinstance(error, AdapterNotFound) for error in errors) and len({str(error) for error in errors}) == 1
    assert not second.is_set()


def test_ten_others_load_while_one_download_stands_still(world: World) -> None:
    slow, others = world.on_web("slow"), [world.on_web(f"a{i}", seed=i) for i in range(10)]
    held, released = world.hold("slow")
    store = world.store()
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(store.find, slow)
        assert held.wait(60)
        assert len({store.find(ref).version for ref in others}) == 10
        assert not waiting.done()
        released.set()
        assert waiting.result(60).num_pages == 1


def test_a_download_tells_how_far_it_is(world: World, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    ref = world.on_web("slow")
    held, released = world.hold("slow")
    told = threading.Event()

    class Told(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "bytes after" in record.getMessage():
                told.set()

    monkeypatch.setattr("loray.deployments.download_log.INTERVAL_S", 0.01)
    logger = logging.getLogger("ray.serve.loray")
    logger.addHandler(handler := Told())
    with caplog.at_level(logging.INFO, "ray.serve.loray"), ThreadPoolExecutor(1) as thread:
        finding = thread.submit(world.store().find, ref)
        assert held.wait(60) and told.wait(60)
        released.set()
        finding.result(60)
    logger.removeHandler(handler)
    size = sum(file.stat().st_size for file in (world.folder / "web" / "slow").iterdir())
    assert f"of {size} bytes after" in caplog.text and f"downloaded {size} bytes in" in caplog.text


def test_an_adapter_larger_than_the_disk_may_hold_is_refused_unread(world: World) -> None:
    ref = world.on_web("large", rank=64)
    with pytest.raises(AdapterFailed, match=r"large.*are more than disk_bytes \(2000\)"):
        world.store(disk_bytes=2000).find(ref)
    assert not world.web.num_gets(f"large/{WEIGHTS}")


def test_the_disk_cache_stays_within_its_bytes_and_keeps_what_is_in_use(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    refs = [world.on_web(f"a{i}", seed=i) for i in range(4)]
    size = sum(file.stat().st_size for file in (world.folder / "web" / "a0").iterdir())
    store = world.store(disk_bytes=2 * size)
    first = store.find(refs[0])
    store.hold(first.path)
    for ref in refs[1:]:
        last = store.find(ref)
    assert [store.disk_bytes(ref) for ref in refs] == [size, 0, 0, size]
    store.hold(last.path)
    monkeypatch.setattr(adapter_store, "ROOM_S", 0.0)
    busy = rf"/a1'.*no room for {size} bytes.*in use or pinned take {2 * size} and downloads under way 0; try again"
    with pytest.raises(Overloaded, match=busy):
        store.find(refs[1])
    store.let_go(last.path)
    assert store.find(refs[1]).path and store.disk_bytes(refs[1]) == size, "that there was no room says nothing of the adapter"


def test_what_was_found_last_is_evicted_last(world: World) -> None:
    a, b, c = (world.on_web(name, seed=seed) for seed, name in enumerate("abc"))
    size = sum(file.stat().st_size for file in (world.folder / "web" / "a").iterdir())
    store = world.store(disk_bytes=2 * size)
    for ref in (a, b, a, c):
        store.find(ref)
    assert [store.disk_bytes(ref) for ref in (a, b, c)] == [size, 0, size]


def test_remove_deletes_the_download_and_never_a_local_folder(world: World) -> None:
    save_folder(world.folder / "local" / "mine", rank=4)
    store, ref, mine = world.store(), world.on_web("small"), AdapterRef(adapter_id="mine")
    path = Path(store.find(ref).path)
    assert store.disk_bytes(ref) == sum(file.stat().st_size for file in path.iterdir())
    for each in (ref, mine):
        store.remove(each)
    assert not path.exists() and store.disk_bytes(ref) == 0 and store.find(mine).num_pages == 1
    num_gets = world.web.num_gets(WEIGHTS)
    assert store.find(ref).path == str(path) and world.web.num_gets(WEIGHTS) == num_gets + 1


def test_a_file_of_another_size_than_the_hub_tells_is_refused_though_it_came_whole(world: World) -> None:
    file = world.folder / "hub" / "org" / "small" / "adapter_config.json"
    commit, body = world.hub.commit("org/small"), file.read_bytes()

    def longer(handler: Handler) -> bool:
        handler.reply(200, body + b" ", ETag='"longer"', X_Repo_Commit=commit)
        return True

    world.hub.rules[f"/org/small/resolve/{commit}/{file.name}"] = longer
    with pytest.raises(AdapterFailed, match=f"org/small.*{file.name} has {len(body)} bytes, {len(body) + 1} came"):
        world.store().find(HUB)
    assert world.store().disk_bytes(HUB) == 0


def test_a_download_that_finds_no_room_is_told_what_takes_it(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter_store, "ROOM_S", 0.0)
    slow, other = world.on_web("slow"), world.on_web("other")
    size = sum(file.stat().st_size for file in (world.folder / "web" / "slow").iterdir())
    held, released = world.hold("slow")
    store = world.store(disk_bytes=1.5 * size)
    with ThreadPoolExecutor(1) as thread:
        finding = thread.submit(store.find, slow)
        assert held.wait(60)
        with pytest.raises(Overloaded, match=f"/other'.*no room for {size} bytes.*in use or pinned take 0 and downloads under way {size}"):
            store.find(other)
        released.set()
        assert finding.result(60).num_pages == store.find(other).num_pages == 1


def test_what_a_reload_finds_no_room_for_is_served_on_as_it_is(world: World) -> None:
    ref = world.on_web("small")
    size = sum(file.stat().st_size for file in (world.folder / "web" / "small").iterdir())
    store = world.store(disk_bytes=1.5 * size)
    old = store.find(ref)
    store.hold(old.path)
    world.on_web("small", seed=1)
    store.forget(ref)
    for _ in range(2):
        found = store.find(ref)
        assert found.version == old.version and f"no room for {size} bytes" in found.unrenewed
    store.let_go(old.path)
    store.forget(ref)
    found = store.find(ref)
    assert found.version != old.version and not found.unrenewed


def test_a_reload_whose_download_fails_leaves_the_version_that_is_there(world: World) -> None:
    ref, other = world.on_web("small"), world.on_web("other", seed=3)
    size = sum(file.stat().st_size for file in (world.folder / "web" / "small").iterdir())
    store = world.store(disk_bytes=2.5 * size)
    old = store.find(ref)
    store.hold(store.find(other).path)
    world.on_web("small", seed=1)
    world.web.rules[f"/small/{WEIGHTS}"] = lambda handler: handler.command == "GET" and handler.reply(500) is None
    store.forget(ref)
    assert store.find(ref).version == old.version


@pytest.mark.parametrize("state", ["served", "broken", "none"])
def test_a_reload_waits_for_no_room_while_a_version_is_served(world: World, state: str, monkeypatch: pytest.MonkeyPatch) -> None:
    is_served, is_held = state == "served", state != "none"
    monkeypatch.setattr(adapter_store, "ROOM_S", 60.0 if is_served else 0.5)
    ref, others = world.on_web("small"), [world.on_web(f"other{i}", seed=3 + i) for i in range(2)]
    size = sum(file.stat().st_size for file in (world.folder / "web" / "small").iterdir())
    store = world.store(disk_bytes=2.5 * size)
    untils = []
    monkeypatch.setattr(store._cache, "grow", lambda *wanted: (untils.append(wanted[-1] > 0), grow(*wanted))[1])
    grow = DiskCache.grow.__get__(store._cache)
    if is_held:
        old = store.find(ref)
        store.hold(old.path)
        if state == "broken":
            flip(Path(old.path) / WEIGHTS)
    for other in others[is_held:]:
        store.hold(store.find(other).path)
    untils.clear()
    world.on_web("small", seed=1)
    store._stale[store.place_key(ref)] = 1
    with ThreadPoolExecutor(1) as thread:
        finding = thread.submit(store.find, ref)
        if is_served:
            assert "no room" in finding.result(30).unrenewed
        else:
            with pytest.raises(Overloaded):
                finding.result(30)
    assert untils == [not is_served]


def test_room_is_waited_for_from_when_it_was_asked(world: World) -> None:
    ref, other = world.on_web("small"), world.on_web("other", seed=1)
    size = sum(file.stat().st_size for file in (world.folder / "web" / "small").iterdir())
    store = world.store(disk_bytes=2.5 * size)
    for each in (other, world.on_web("third", seed=2)):
        store.hold(store.find(each).path)
    with ThreadPoolExecutor(1) as thread, pytest.raises(Overloaded):
        thread.submit(store.find, ref, time.monotonic() - adapter_store.ROOM_S).result(adapter_store.ROOM_S / 2)


def test_who_waits_for_his_turn_waits_for_room_meanwhile(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter_store, "ROOM_S", 1.0)
    ref, other = world.on_web("small"), world.on_web("other", seed=1)
    size = sum(file.stat().st_size for file in (world.folder / "web" / "small").iterdir())
    store = world.store(disk_bytes=2 * size)
    for each in (other, world.on_web("third", seed=2)):
        store.hold(store.find(each).path)
    began = time.monotonic()
    with ThreadPoolExecutor(20) as threads:
        for waiting in [threads.submit(store.find, ref) for _ in range(20)]:
            with pytest.raises(Overloaded):
                waiting.result(60)
    assert time.monotonic() - began < 10 * adapter_store.ROOM_S


def test_what_is_held_after_its_removal_is_not_there_to_be_served(world: World) -> None:
    store, ref = world.store(), world.on_web("small")
    assert not store.is_on_disk(ref)
    store.hold(store.find(ref).path)
    assert store.is_on_disk(ref)
    store.remove(ref)
    assert store.disk_bytes(ref) and not store.is_on_disk(ref)


def test_what_is_private_is_so_though_others_needed_its_room_at_once(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.hub.readers["org/small"] = {"hf_one"}
    store = world.store(default_source="hub")
    find = store._find_download
    monkeypatch.setattr(store, "_find_download", lambda wish: (find(wish), shutil.rmtree(world.folder / "cache"))[0])
    assert store.find(with_token("hf_one")).is_private


def test_what_pins_may_keep_out_for_ever_is_refused_at_once(world: World) -> None:
    small, large = world.on_web("small"), world.on_web("large", rank=64)
    sizes = [sum(file.stat().st_size for file in (world.folder / "web" / name).iterdir()) for name in ("small", "large")]
    store = world.store(disk_bytes=sum(sizes) - 1)
    store.hold(store.find(small).path)
    with (
        ThreadPoolExecutor(1) as thread,
        pytest.raises(Overloaded, match=f"no room for {sizes[1]} bytes.*in use or pinned take {sizes[0]}"),
    ):
        thread.submit(store.find, large).result(adapter_store.ROOM_S / 2)


def test_the_processes_of_a_node_wait_for_room_side_by_side(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter_store, "ROOM_S", 2.0)
    held, other = world.on_web("held"), world.on_web("other")
    size = sum(file.stat().st_size for file in (world.folder / "web" / "held").iterdir())
    first = world.store(disk_bytes=2.5 * size)
    first.hold(first.find(held).path)
    first.hold(first.find(world.on_web("too", seed=1)).path)
    began = time.monotonic()
    with ThreadPoolExecutor(4) as threads:
        for waiting in [threads.submit(world.store(disk_bytes=2.5 * size).find, other) for _ in range(4)]:
            with pytest.raises(Overloaded):
                waiting.result()
    assert time.monotonic() - began < 3 * adapter_store.ROOM_S


def test_a_merge_waits_for_no_room_since_it_holds_its_parts(world: World) -> None:
    part, other = world.on_web("part"), world.on_web("other")
    store = world.store(disk_bytes=MERGE_BYTES + 4000)
    store.merge = merging([])
    found = store.find(part)
    for each in (found, store.find(other)):
        store.hold(each.path)
    with ThreadPoolExecutor(1) as thread, pytest.raises(Overloaded, match="half.*no room"):
        thread.submit(store.merged, merge_ref("half", "part", weights=(0.5,)), [found]).result(adapter_store.ROOM_S / 2)


def test_a_merge_whose_part_has_left_the_disk_for_others_is_not_made_now(world: World) -> None:
    part = world.on_web("part")
    store = world.store()
    store.merge = merging([])
    found = store.find(part)
    store.remove(part)
    half = merge_ref("half", "part", weights=(0.5,))
    with pytest.raises(Overloaded, match=r"half.*/part' has left the disk.*try again"):
        store.merged(half, [found])
    assert store.merged(half, [store.find(part)]).rank == 4


def test_a_broken_merge_is_not_in_the_way_of_its_next(world: World) -> None:
    part, other = world.folder / "local" / "part", world.on_web("other", rank=64, seed=3)
    save_folder(part, rank=4)
    sizes = [sum(file.stat().st_size for file in folder.iterdir()) for folder in (part, world.folder / "web" / "other")]
    half, slack = merge_ref("half", "part", weights=(0.5,)), sizes[0] // 2
    store = world.store(disk_bytes=2 * sizes[0] + MERGE_BYTES + sizes[1] + slack)
    store.merge = merging([])
    parts = [store.find(AdapterRef(adapter_id="part"))]
    made = store.merged(half, parts)
    store.hold(store.find(other).path)
    flip(Path(made.path) / WEIGHTS)
    assert store.held_merge(half, parts) is None
    assert store.merged(half, parts).version == made.version


def test_parts_that_could_never_lie_beside_their_merge_are_refused_before_it_is_made(world: World) -> None:
    parts = [world.store(disk_bytes=MERGE_BYTES + 4000).find(world.on_web(name, seed=seed)) for seed, name in enumerate("ab")]
    store, both = world.store(disk_bytes=MERGE_BYTES + 4000), merge_ref("both", "a", "b", weights=(0.5, 0.5))
    store.check_merge(both, parts[:1])
    with pytest.raises(AdapterFailed, match=r"both.*with its parts it may take \d+ bytes on disk, more than adapters.disk_bytes"):
        store.check_merge(both, parts)


def test_a_merge_that_can_never_fit_on_disk_says_so(world: World) -> None:
    part = world.on_web("part")
    store = world.store(disk_bytes=500_000)
    store.merge = merging([])
    half = merge_ref("half", "part", weights=(0.5,))
    with pytest.raises(AdapterFailed, match=r"^adapter 'half': .* bytes on disk, more than adapters.disk_bytes \(500000\)$"):
        store.merged(half, [store.find(part)])


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda folder: (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes()[:-4]), "cut short"),
        (lambda folder: (folder / WEIGHTS).write_bytes(b"nonsense" * 10), "cut short"),
        (lambda folder: (folder / "adapter_config.json").write_text("{"), "cannot be read"),
        (lambda folder: (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "IA3"})), "IA3"),
        (lambda folder: (folder / WEIGHTS).rename(folder / "adapter_model.bin"), "pickle"),
        (lambda folder: (folder / WEIGHTS).unlink(), "missing"),
    ],
)
def test_a_broken_adapter_is_refused_with_its_name_and_the_reason_and_leaves_nothing(
    world: World, spoil: Callable[[Path], Any], reason: str
) -> None:
    ref = world.on_web("broken")
    spoil(world.folder / "web" / "broken")
    store = world.store()
    with pytest.raises(AdapterFailed, match=rf"/broken'.*{reason}"):
        store.find(ref)
    assert store.disk_bytes(ref) == 0 and store.names() == []
    assert not list((world.folder / "cache").glob("partial/*"))


def test_an_adapter_of_another_base_is_refused_also_from_disk_and_not_downloaded_again(world: World) -> None:
    ref = world.on_web("small")
    world.store().find(ref)
    num_gets = world.web.num_gets(WEIGHTS)
    args = AdapterArgs(allowed_urls=[world.web.url])
    other = AdapterStore(args, {"model.layers.0.self_attn.q_proj": (32, 24)}, world.folder / "cache")
    with pytest.raises(AdapterFailed, match=r"/small'.*shape"):
        other.find(ref)
    assert world.web.num_gets(WEIGHTS) == num_gets
    assert world.store().find(ref).num_pages == 1


def test_a_failure_is_answered_at_once_for_a_while_and_forgotten_on_demand(world: World) -> None:
    store, ref = world.store(), AdapterRef(adapter_id=f"{world.web.url}/late")
    messages = set()
    for _ in range(3):
        with pytest.raises(AdapterNotFound) as raised:
            store.find(ref)
        messages.add(raised.value.message)
    assert len(messages) == 1
    num_requests = len(world.web.requests)
    world.on_web("late")
    with pytest.raises(AdapterNotFound):
        store.find(ref)
    assert len(world.web.requests) == num_requests
    store.forget(ref)
    assert store.find(ref).num_pages == 1


def test_many_bad_ids_leave_memory_and_disk_where_they_were(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (adapter_readers, remembered_failures):
        monkeypatch.setattr(module, "MAX_REMEMBERED", 50)
    store = world.store()
    for i in range(100):
        for adapter_id in (f"{world.web.url}/none{i}", f"https://off.example/{i}", f"../{i}", f"https://host/../{i}"):
            with pytest.raises((AdapterFailed, InvalidRequest)):
                store.find(AdapterRef(adapter_id=adapter_id))
    assert len(store._failures) == 50 and len(store._fetching) == 0 and not store._stale
    assert not (world.folder / "cache").exists()


def test_a_url_taken_off_the_list_is_not_served_from_disk_either(world: World) -> None:
    ref = world.on_web("small")
    world.store().find(ref)
    with pytest.raises(AdapterFailed, match="allowed_urls"):
        world.store(allowed_urls=[]).find(ref)


def test_a_private_adapter_needs_a_token_that_may_read_it_on_every_request(world: World) -> None:
    world.hub.readers["org/small"] = {"hf_one", "hf_two"}
    for store in (world.store(default_source="hub"), world.store(default_source="hub")):  # the second finds it on disk
        for token in ("", "hf_bad"):
            with pytest.raises(AdapterNotFound) as refused:
                store.find(with_token(token))
            assert refused.value.message == "adapter 'org/small' is not on the hub, or not for this token"
        for token in ("hf_one", "hf_two"):
            assert store.find(with_token(token)).num_pages == 1
        for token in ("", "hf_bad"):
            with pytest.raises(AdapterNotFound):
                store.find(with_token(token))
        assert store.names() == [] and store.is_private(HUB)
    assert world.hub.num_gets(WEIGHTS) == 1


def test_a_token_that_was_confirmed_is_not_asked_about_again_until_its_time_is_over(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.hub.readers["org/small"] = {"hf_one"}
    store = world.store()
    for _ in range(2):
        store.find(with_token("hf_one"))
    num_requests = len(world.hub.requests)
    store.find(with_token("hf_one"))
    assert len(world.hub.requests) == num_requests
    monkeypatch.setattr(adapter_readers, "TOKEN_S", 1e-9)
    later = world.store()
    later.find(with_token("hf_one"))
    world.hub.readers["org/small"] = set()
    with pytest.raises(AdapterNotFound):
        later.find(with_token("hf_one"))


def test_after_a_reload_every_token_is_asked_about_again(world: World) -> None:
    world.hub.readers["org/small"] = {"hf_one", "hf_two"}
    store = world.store()
    for token in ("hf_one", "hf_two"):
        store.find(with_token(token))
    store.forget(HUB)
    world.hub.readers["org/small"] = {"hf_one"}
    store.find(with_token("hf_one"))
    with pytest.raises(AdapterNotFound):
        store.find(with_token("hf_two"))


def test_after_it_was_removed_every_token_is_asked_about_again(world: World) -> None:
    world.hub.readers["org/small"] = {"hf_one", "hf_two"}
    store = world.store()
    for token in ("hf_one", "hf_two"):
        store.find(with_token(token))
    store.remove(HUB)
    world.hub.readers["org/small"] = {"hf_one"}
    store.find(with_token("hf_one"))
    with pytest.raises(AdapterNotFound):
        store.find(with_token("hf_two"))


def test_equal_files_that_became_private_are_after_a_reload_for_their_readers_alone(world: World) -> None:
    store = world.store(default_source="hub")
    first = store.find(HUB)
    assert store.names() == ["org/small"]
    world.hub.readers["org/small"] = {"hf_one"}
    store.forget(HUB)
    assert store.find(with_token("hf_one")).path == first.path and world.hub.num_gets(WEIGHTS) == 1
    for each in (store, world.store(default_source="hub")):  # the second knows but what is on disk
        assert each.is_private(HUB) and each.names() == []
        for token in ("", "hf_bad"):
            with pytest.raises(AdapterNotFound):
                each.find(with_token(token))


def test_equal_files_that_became_public_are_after_a_reload_for_everybody(world: World) -> None:
    world.hub.readers["org/small"] = {"hf_one"}
    store = world.store(default_source="hub")
    store.find(with_token("hf_one"))
    del world.hub.readers["org/small"]
    store.forget(HUB)
    store.find(with_token("hf_one"))
    for each in (store, world.store(default_source="hub")):
        assert not each.is_private(HUB) and each.names() == ["org/small"] and each.find(HUB).num_pages == 1
    assert world.hub.num_gets(WEIGHTS) == 1


def test_who_waits_for_the_download_of_another_needs_a_token_of_his_own(world: World) -> None:
    world.hub.readers["org/small"] = {"hf_one"}
    world.hub.rules[f"/org/small/resolve/{world.hub.commit('org/small')}/{WEIGHTS}"] = hold = Hold()
    store = world.store()
    with ThreadPoolExecutor(2) as threads:
        good = threads.submit(store.find, with_token("hf_one"))
        assert hold.held.wait(60)
        bad = threads.submit(store.find, with_token("hf_bad"))
        hold.released.set()
        assert good.result(60).num_pages == 1
        with pytest.raises(AdapterNotFound):
            bad.result(60)


def test_the_servers_own_token_serves_requests_without_one_and_no_others(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.hub.readers["org/small"] = {"hf_server"}
    monkeypatch.setattr(adapter_store, "get_token", lambda: "hf_server")
    store = world.store()
    assert store.find(HUB).num_pages == 1
    with pytest.raises(AdapterNotFound):
        store.find(with_token("hf_bad"))


def test_a_token_is_in_no_log_no_error_and_no_file(world: World, caplog: pytest.LogCaptureFixture) -> None:
    world.hub.readers["org/small"] = {"hf_secret"}
    store = world.store()
    with caplog.at_level(logging.DEBUG, "ray.serve.loray"):
        store.find(with_token("hf_secret"))
        with pytest.raises(AdapterNotFound) as raised:
            store.find(AdapterRef(adapter_id="org/none", source="hub", api_token="hf_secret"))
    assert "hf_secret" not in caplog.text + raised.value.message + repr(store.__dict__)
    for file in (world.folder / "cache").rglob("*"):
        assert "hf_secret" not in file.name and (file.is_dir() or b"hf_secret" not in file.read_bytes())


def test_a_reference_that_means_nothing_has_no_bytes_and_nothing_to_forget(world: World) -> None:
    store, ref = world.store(), AdapterRef(adapter_id="a, b", source="hub")
    store.forget(ref)
    store.remove(ref)
    assert store.disk_bytes(ref) == 0 and not store.is_private(ref) and not store._stale


def test_what_an_earlier_process_left_on_disk_is_found_by_its_name_and_can_be_removed(world: World) -> None:
    world.hub.readers["org/small"] = {"hf_one"}
    web, local = world.on_web("small"), AdapterRef(adapter_id="mine")
    save_folder(world.folder / "local" / "mine", rank=4)
    earlier = world.store()
    found = {adapter.path: adapter.version for adapter in (earlier.find(with_token("hf_one")), earlier.find(web))}
    store = world.store(default_source="local")
    assert [ref for ref, _ in store.left_on_disk({store.place_key(HUB), store.place_key(local)})] == [store.named(web)]
    left = store.left_on_disk(set())
    assert {adapter.path: adapter.version for _, adapter in left} == found
    assert {ref.adapter_id: (store.disk_bytes(ref) > 0, store.is_private(ref)) for ref, _ in left} == {
        "org/small": (True, True),
        web.adapter_id: (True, False),
    }
    for ref, adapter in left:
        store.remove(ref)
        assert not Path(adapter.path).exists() and store.disk_bytes(ref) == 0
    assert not store.left_on_disk(set())


def test_a_merge_is_made_once_and_another_recipe_or_version_is_another_merge(world: World) -> None:
    merges: list[Path] = []
    stores = [world.store(), world.store()]
    parts = [stores[0].find(world.on_web(name, seed=seed)) for seed, name in enumerate(("a", "b"))]
    a_and_b = merge_ref("a and b", "a", "b", weights=(0.5, 0.5))
    for store in stores:
        store.merge = merging(merges)
    first, second = (store.merged(a_and_b, parts) for store in stores)
    assert (first.path, first.version, first.rank, first.adapter_id) == (second.path, second.version, 8, "a and b")
    assert len(merges) == 1
    stores[0].merged(merge_ref("a and b", "a", "b", weights=(0.5, 0.6)), parts)
    stores[0].merged(a_and_b, [parts[0], stores[0].find(world.on_web("c", seed=2))])
    assert len(merges) == 3 and not list((world.folder / "cache").glob("partial/*"))
    assert stores[0].names() == [f"{world.web.url}/{name}" for name in ("a", "b", "c")]


def test_a_recipe_is_carried_out_to_the_letter(world: World) -> None:
    store, methods = world.store(), []
    store.merge = lambda folders, weights, method, shapes, out: (
        methods.append((weights, method)),
        merging([])(folders, weights, method, shapes, out),
    )
    parts = [store.find(world.on_web(name, seed=seed)) for seed, name in enumerate(("a", "b"))]
    recipe = MergeRecipe(adapter_ids=("a", "b"), weights=(0.5, -0.25), strategy="ties", density=0.3, majority_sign="frequency")
    store.merged(AdapterRef(adapter_id="a and b", merge=recipe), parts)
    assert methods == [((0.5, -0.25), {"strategy": "ties", "density": 0.3, "majority_sign": "frequency"})]


def test_a_merge_that_there_could_never_be_room_for_is_refused_before_it_is_made(world: World) -> None:
    merges: list[Path] = []
    refs = [world.on_web(name, rank=8, seed=seed) for seed, name in enumerate(("a", "b"))]
    store = world.store(AdapterRoom(num_pages=1, page_bytes=1000, host_bytes=1000))
    store.merge = merging(merges)
    parts, weights = [store.find(ref) for ref in refs], (0.5, 0.5)
    with pytest.raises(AdapterFailed, match="'both' needs 2 rank pages, the pool has 1"):
        store.merged(merge_ref("both", "a", "b", weights=weights), parts)
    assert not merges
    ties = MergeRecipe(adapter_ids=("a", "b"), weights=weights, strategy="ties")
    assert store.merged(AdapterRef(adapter_id="both", merge=ties), parts).num_pages == 1


def test_a_merge_of_files_that_change_meanwhile_is_not_kept(world: World) -> None:
    store, target = world.store(), world.folder / "local" / "part"
    save_folder(target, 4, seed=5)

    def merge_late(*args: Any) -> None:
        save_folder(target, 4, seed=6)
        merging([])(*args)

    store.merge = merge_late
    part = store.find(AdapterRef(adapter_id="part"))
    half = merge_ref("half a part", "part", weights=(0.5,))
    with pytest.raises(AdapterChanged, match="'part' has changed while it was merged"):
        store.merged(half, [part])
    assert not list((world.folder / "cache").glob("merge-*"))
    store.merge = merging([])
    assert store.merged(half, [store.find(AdapterRef(adapter_id="part"))]).path


def test_a_merge_of_files_that_change_while_they_are_opened_is_made_when_it_is_asked_for_again(world: World) -> None:
    def open_torn(*args: Any) -> None:
        raise FilesChanged("adapter 'part': its files changed while they were read")

    store, target = world.store(), world.folder / "local" / "part"
    save_folder(target, 4, seed=5)
    part, half = store.find(AdapterRef(adapter_id="part")), merge_ref("half a part", "part", weights=(0.5,))
    store.merge = open_torn
    for _ in range(2):
        with pytest.raises(AdapterChanged, match="changed while they were read"):
            store.merged(half, [part])
    store.merge = merging([])
    assert store.merged(half, [part]).path


def test_a_merge_that_fails_says_so_and_leaves_nothing(world: World) -> None:
    merges: list[Path] = []
    store = world.store()
    store.merge = merging(merges)
    part = store.find(world.on_web("a"))
    for _ in range(2):
        with pytest.raises(AdapterFailed, match=r"much of a.*float32"):
            store.merged(merge_ref("much of a", "a", "a", weights=(1e300, 1e300)), [part, part])
    assert len(merges) == 1 and not list((world.folder / "cache").glob("partial/*"))


def test_a_cache_that_cannot_be_written_is_an_error_of_the_adapter(world: World) -> None:
    (world.folder / "cache").write_text("a file where the folder should be")
    with pytest.raises(AdapterFailed, match="small"):
        world.store().find(world.on_web("small"))


def test_a_merge_has_room_on_disk_for_its_values_in_float32(world: World) -> None:
    save_folder(world.folder / "local" / "part", rank=4)
    num_bytes = sum((world.folder / "local" / "part" / name).stat().st_size for name in (WEIGHTS, "adapter_config.json"))
    half, enough = merge_ref("half", "part", weights=(0.5,)), 2 * num_bytes + MERGE_BYTES
    for disk_bytes in (enough - 1, enough):
        store = world.store(disk_bytes=disk_bytes)
        store.merge = merging([])
        part = store.find(AdapterRef(adapter_id="part"))
        if disk_bytes < enough:
            with pytest.raises(AdapterFailed, match=f"{enough} bytes on disk, more than"):
                store.merged(half, [part])
        else:
            assert store.merged(half, [part]).num_pages == 1


def test_what_was_removed_is_not_kept_in_mind_as_one_to_be_asked_for_anew(world: World) -> None:
    ref, store = world.on_web("small"), world.store()
    store.find(ref)
    store.remove(ref)
    assert not store.is_stale(ref) and not store._stale


def test_after_forget_what_a_server_without_tags_has_is_downloaded_anew(world: World) -> None:
    def untagged(handler: Handler) -> bool:
        handler.reply(200, (world.folder / "web" / handler.path.lstrip("/")).read_bytes())
        return True

    ref, store = world.on_web("small"), world.store()
    world.web.rules = dict.fromkeys((f"/small/{name}" for name in (WEIGHTS, "adapter_config.json")), untagged)
    old = store.find(ref)
    world.on_web("small", seed=1)
    store.forget(ref)
    assert store.find(ref).version != old.version
