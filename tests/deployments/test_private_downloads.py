"""Downloads for some alone: who may not read one learns so at once, and keeps nobody from what its source has now."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from loray.deployments.adapter_store import AdapterStore
from loray.deployments.config import AdapterArgs
from loray.deployments.errors import AdapterNotFound
from loray.deployments.request import AdapterRef
from tests.deployments.file_server import Handler, HubServer
from tests.deployments.peft_folder import SHAPES, save_folder

HELD_S = 20.0  # at most, so that a failing test ends


class Hub(HubServer):
    """Holds back some answers until its door is open."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.is_held: Callable[[Handler], bool] = lambda handler: False
        self.door, self.is_asked = threading.Event(), threading.Event()

    def answer(self, handler: Handler) -> None:
        if self.is_held(handler):
            self.is_asked.set()
            self.door.wait(HELD_S)
        super().answer(handler)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    served = Hub(tmp_path / "hub")
    served.stand_in(monkeypatch, tmp_path / "home")
    save_folder(served.root / "org" / "secret", rank=4, seed=0)
    served.readers["org/secret"] = {"good", "better"}
    yield served
    served.door.set()
    served.close()


@pytest.fixture
def store(hub: Hub, tmp_path: Path) -> AdapterStore:
    return AdapterStore(AdapterArgs(default_source="hub"), SHAPES, tmp_path / "cache")


def secret(token: str) -> AdapterRef:
    return AdapterRef(adapter_id="org/secret", api_token=token)


def test_who_may_not_read_it_does_not_wait_for_the_download_of_who_may(hub: Hub, store: AdapterStore) -> None:
    hub.is_held = lambda handler: "safetensors" in handler.path
    with ThreadPoolExecutor() as threads:
        download = threads.submit(store.find, secret("good"))
        assert hub.is_asked.wait(HELD_S)
        for token in ("bad", ""):
            with pytest.raises(AdapterNotFound):
                store.find(secret(token))
        assert not hub.door.is_set() and not download.done()
        hub.door.set()
        assert download.result().is_private


@pytest.mark.parametrize("token", ["bad", "better"])
@pytest.mark.parametrize("held", ["/api/", "safetensors"])
def test_what_is_found_after_a_reload_is_what_the_source_has_whoever_asks_meanwhile(
    hub: Hub, store: AdapterStore, token: str, held: str
) -> None:
    old = store.find(secret("good"))
    save_folder(hub.root / "org" / "secret", rank=4, seed=1)
    store.forget(secret("good"))
    hub.is_held = lambda handler: held in handler.path and hub._token(handler) == token
    with ThreadPoolExecutor() as threads:
        other = threads.submit(store.find, secret(token))
        hub.is_asked.wait(0.5)  # not by who may not read it, where its files are held
        ours = threads.submit(store.find, secret("good"))
        hub.door.set()
        assert ours.result().version != old.version
        assert (other.exception() is None) == (token == "better")
    assert store.find(secret("good")).version == ours.result().version


def test_who_may_not_read_it_does_not_use_up_a_reload(hub: Hub, store: AdapterStore) -> None:
    old = store.find(secret("good"))
    save_folder(hub.root / "org" / "secret", rank=4, seed=1)
    store.forget(secret("good"))
    with pytest.raises(AdapterNotFound):
        store.find(secret("bad"))
    assert store.is_stale(secret("good")), "he could not ask it"
    assert store.find(secret("good")).version != old.version
    assert not store.is_stale(secret("good"))


def test_what_is_removed_while_its_source_is_asked_is_gone_when_it_has_come(hub: Hub, store: AdapterStore, tmp_path: Path) -> None:
    hub.is_held = lambda handler: "/api/" in handler.path
    with ThreadPoolExecutor() as threads:
        download = threads.submit(store.find, secret("good"))
        assert hub.is_asked.wait(HELD_S)
        removal = threads.submit(store.remove, secret(""))
        hub.door.set()
        download.result(), removal.result()
    assert not list((tmp_path / "cache").rglob("*.safetensors"))


def test_a_later_wish_for_what_the_source_has_now_outlives_an_earlier_answer(hub: Hub, store: AdapterStore) -> None:
    store.find(secret("good"))
    store.forget(secret("good"))
    hub.is_held = lambda handler: "/api/" in handler.path and hub._token(handler) == "better"
    with ThreadPoolExecutor() as threads:
        slow = threads.submit(store.find, secret("better"))
        assert hub.is_asked.wait(HELD_S)
        store.find(secret("good"))
        store.forget(secret("good"))
        hub.door.set()
        slow.result()
    assert store.is_stale(secret("good"))


def test_what_has_become_private_is_for_nobody_else_though_its_new_version_does_not_come(hub: Hub, store: AdapterStore) -> None:
    hub.readers.pop("org/secret")
    old = store.find(secret(""))
    assert not old.is_private
    hub.readers["org/secret"] = {"good"}
    save_folder(hub.root / "org" / "secret", rank=64, seed=1)
    store._max_bytes = store._cache._room.max_bytes = 10_000  # there is no room for it
    store.hold(old.path)
    store.forget(secret("good"))
    found = store.find(secret("good"))
    assert found.version == old.version and found.unrenewed and found.is_private
    with pytest.raises(AdapterNotFound):
        store.find(secret(""))
    assert store.names() == []
