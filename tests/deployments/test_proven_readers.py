"""A private adapter beside a flood of tokens that somebody made up: who could read it a while ago does not wait among them."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import closing, nullcontext
from pathlib import Path

import pytest

from loray.deployments.adapter_finder import AdapterFinder
from loray.deployments.adapter_store import AdapterStore
from loray.deployments.config import AdapterArgs
from loray.deployments.errors import AdapterNotFound, Overloaded
from loray.deployments.request import AdapterRef
from tests.deployments.file_server import Handler, HubServer
from tests.deployments.peft_folder import SHAPES, save_folder

MAX_WAITING = 20  # more than one adapter has threads


class SlowHub(HubServer):
    """Answers readers alone before the door opens."""

    door = threading.Event()

    def answer(self, handler: Handler) -> None:
        if self._token(handler) != "hf_good":
            self.door.wait(60)
        super().answer(handler)


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[AdapterStore]:
    save_folder(tmp_path / "hub" / "org" / "mine", rank=4)
    with closing(SlowHub(tmp_path / "hub")) as hub:
        hub.stand_in(monkeypatch, tmp_path)
        hub.readers["org/mine"] = {"hf_good"}
        hub.door.set()
        yield AdapterStore(AdapterArgs(default_source="hub"), SHAPES, tmp_path / "cache")
        hub.door.set()


def ref(token: str) -> AdapterRef:
    return AdapterRef(adapter_id="org/mine", api_token=token)


def test_who_could_read_it_a_while_ago_does_not_wait_among_made_up_tokens(store: AdapterStore) -> None:
    async def run() -> None:
        finder = AdapterFinder(store, MAX_WAITING, needed=lambda adapter: nullcontext())
        assert not store.is_proven(ref("hf_good"))
        for _ in range(2):  # downloaded, then asked about
            await finder.find(ref("hf_good"))
        assert store.is_proven(ref("hf_good")) and not store.is_proven(ref("hf_bad"))
        store._readers._readers.drop(lambda asker: True)  # some minutes later: the hub is asked anew
        SlowHub.door.clear()
        flood = [asyncio.create_task(finder.find(ref(f"hf_bad{number}"))) for number in range(MAX_WAITING)]
        while sum(finder._num_waiting.values()) < MAX_WAITING:
            await asyncio.sleep(0.01)
        with pytest.raises(Overloaded):
            await finder.find(ref("hf_more"))
        await asyncio.wait_for(finder.find(ref("hf_good")), 30)
        SlowHub.door.set()
        assert {type(one) for one in await asyncio.gather(*flood, return_exceptions=True)} == {AdapterNotFound}
        store.remove(ref("hf_good"))
        assert not store.is_proven(ref("hf_good"))

    asyncio.run(run())
