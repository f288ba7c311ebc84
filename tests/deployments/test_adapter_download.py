"""What a config alone tells to be refused is refused before anybody makes room for the weights or asks for them."""

import json
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest
from moto.server import ThreadedMotoServer

from loray.deployments.adapter_room import ANY_ROOM, AdapterRoom
from loray.deployments.adapter_store import AdapterStore
from loray.deployments.config import AdapterArgs
from loray.deployments.errors import AdapterFailed
from loray.deployments.request import AdapterRef
from tests.deployments.file_server import FileServer, Handler, HubServer
from tests.deployments.peft_folder import SHAPES, save_folder

pytestmark = pytest.mark.slow  # servers of its own

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
SMALL_ROOM = AdapterRoom(num_pages=2, page_bytes=1000, host_bytes=2000)


class World:
    """The same adapter on a hub, on a web server and in a local folder, and a disk that two others fill."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.places = {"hub": folder / "hub" / "org" / "new", "web": folder / "web" / "new", "local": folder / "local" / "new"}
        for place in self.places.values():
            save_folder(place, rank=4)
        self.hub, self.web = HubServer(folder / "hub"), FileServer(folder / "web")
        self.refs = {
            "hub": AdapterRef(adapter_id="org/new", source="hub"),
            "web": AdapterRef(adapter_id=f"{self.web.url}/new"),
            "local": AdapterRef(adapter_id="new"),
        }
        self.others = [AdapterRef(adapter_id=f"{self.web.url}/{name}") for name in "ab"]
        for seed, name in enumerate("ab"):
            save_folder(folder / "web" / name, rank=16, seed=seed)

    def store(self, room: AdapterRoom = ANY_ROOM, disk_bytes: int = 1 << 30) -> AdapterStore:
        args = AdapterArgs(local_roots=[self.folder / "local"], allowed_urls=[self.web.url], disk_bytes=disk_bytes)
        return AdapterStore(args, SHAPES, self.folder / "cache", room)

    def full_store(self, room: AdapterRoom) -> AdapterStore:
        store = self.store(room, disk_bytes=sum(file.stat().st_size for name in "ab" for file in (self.folder / "web" / name).iterdir()))
        for other in self.others:
            store.find(other)
        return store

    def spoil(self, change: Callable[[Path], Any]) -> None:
        for place in self.places.values():
            change(place)

    def num_gets(self, source: str, name: str) -> int:
        return self.hub.num_gets(name) if source == "hub" else self.web.num_gets(f"new/{name}")


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    made = World(tmp_path)
    made.hub.stand_in(monkeypatch, tmp_path / "hf")
    yield made
    made.hub.close()
    made.web.close()


def with_fields(**fields: Any) -> Callable[[Path], Any]:
    return lambda folder: (folder / CONFIG).write_text(json.dumps({**json.loads((folder / CONFIG).read_text()), **fields}))


def with_config(text: str) -> Callable[[Path], Any]:
    return lambda folder: (folder / CONFIG).write_text(text)


def refusal(store: AdapterStore, ref: AdapterRef) -> str:
    with pytest.raises(AdapterFailed) as raised:
        store.find(ref)
    return raised.value.message.replace(repr(ref.adapter_id), "NAME")


FAULTS: dict[str, Callable[[Path], Any]] = {
    "another kind": with_fields(peft_type="IA3"),
    "a whole module": with_fields(modules_to_save=["lm_head"]),
    "no JSON": with_config("{"),
    "no object": with_config("[]"),
    "no rank": with_fields(r=None),
    "half a rank": with_fields(r=2.5),
    "too high a rank": lambda folder: save_folder(folder, rank=17),
}


@pytest.mark.parametrize("source", ["hub", "web"])
@pytest.mark.parametrize("fault", FAULTS)
def test_what_its_config_refuses_costs_nobody_anything(world: World, source: str, fault: str) -> None:
    world.spoil(FAULTS[fault])
    store = world.full_store(SMALL_ROOM)
    sizes = [store.disk_bytes(other) for other in world.others]
    assert refusal(store, world.refs[source]) == refusal(store, world.refs["local"]), "the message does not tell what was fetched"
    assert (world.num_gets(source, CONFIG), world.num_gets(source, WEIGHTS)) == (1, 0)
    assert [store.disk_bytes(other) for other in world.others] == sizes and all(sizes)
    assert not list((world.folder / "cache").glob("partial/*"))
    refusal(store, world.refs[source])
    assert world.num_gets(source, CONFIG) == 1, "it is remembered"


@pytest.mark.parametrize("source", ["hub", "web"])
@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"target_modules": ["c_attn"]}, "NAME: target_modules is ['c_attn']: the base model has no such module that can carry LoRA"),
        ({"rank_pattern": {"q_proj": 17}}, "NAME needs 3 rank pages, the pool has 2: raise adapters.gpu_bytes"),
    ],
)
def test_a_config_for_another_base_or_with_one_rank_too_high_is_enough(
    world: World, source: str, fields: dict[str, Any], message: str
) -> None:
    world.spoil(with_fields(**fields))
    assert refusal(world.full_store(SMALL_ROOM), world.refs[source]) == f"adapter {message}"
    assert world.num_gets(source, WEIGHTS) == 0


@pytest.mark.parametrize("source", ["hub", "web"])
def test_files_too_large_for_any_adapter_are_refused_unread(world: World, source: str) -> None:
    store, ref = world.store(SMALL_ROOM), world.refs[source]
    room = SMALL_ROOM.max_weights_bytes(SHAPES)
    weights, config = world.places[source] / WEIGHTS, (world.places[source] / CONFIG).read_bytes()
    (world.places[source] / CONFIG).write_bytes(b" " * ((1 << 20) + 1))
    assert refusal(store, ref) == f"adapter NAME: {CONFIG} has 1048577 bytes, more than 1048576"
    (world.places[source] / CONFIG).write_bytes(config)
    os.truncate(weights, room + 1)
    store.forget(ref)
    assert f"{WEIGHTS} has {room + 1} bytes, more than there could ever be room for ({room}): raise" in refusal(store, ref)
    assert world.num_gets(source, CONFIG) == world.num_gets(source, WEIGHTS) == 0
    os.truncate(weights, room)
    store.forget(ref)
    assert "is corrupt" in refusal(store, ref) and world.num_gets(source, WEIGHTS) == 1


@pytest.mark.parametrize("source", ["hub", "web"])
@pytest.mark.parametrize(("name", "max_bytes"), [("chat_template.jinja", 1 << 20), ("tokenizer_config.json", 16 << 20)])
def test_a_template_too_large_to_be_read_is_not_fetched(world: World, source: str, name: str, max_bytes: int) -> None:
    file = world.places[source] / name
    file.touch()
    os.truncate(file, max_bytes + 1)
    assert refusal(world.store(), world.refs[source]) == f"adapter NAME: {name} has more than {max_bytes} bytes"
    assert world.num_gets(source, name) == world.num_gets(source, WEIGHTS) == 0


@pytest.mark.parametrize("source", ["hub", "web"])
def test_each_file_of_a_good_adapter_is_fetched_once(world: World, source: str) -> None:
    (world.places[source] / "chat_template.jinja").write_text("{{ messages }}")
    found = world.store(SMALL_ROOM).find(world.refs[source])
    names = sorted(file.name for file in Path(found.path).iterdir())
    assert names == [CONFIG, WEIGHTS, "chat_template.jinja"] and [world.num_gets(source, name) for name in names] == [1, 1, 1]
    assert all((Path(found.path) / name).read_bytes() == (world.places[source] / name).read_bytes() for name in names)


def test_a_config_that_changes_before_the_weights_come_is_not_used_with_them(world: World) -> None:
    def replace_config(handler: Handler) -> bool:
        if handler.command == "GET":
            with_fields(lora_alpha=1)(world.places["web"])
        return False

    world.web.rules[f"/new/{WEIGHTS}"] = replace_config
    found = world.store().find(world.refs["web"])
    assert json.loads((Path(found.path) / CONFIG).read_text())["lora_alpha"] == 1 and world.num_gets("web", CONFIG) == 2


def test_when_its_source_has_a_config_to_refuse_what_is_on_disk_is_served_on(world: World) -> None:
    store, ref = world.store(), world.refs["web"]
    old = store.find(ref)
    world.spoil(with_fields(peft_type="IA3"))
    store.forget(ref)
    found = store.find(ref)
    assert found.version == old.version and "IA3" in found.unrenewed and world.num_gets("web", WEIGHTS) == 1


def test_of_a_config_on_s3_that_is_refused_the_weights_are_not_asked_for(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "test")
    moto = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=True)
    moto.start()
    host, port = moto.get_host_and_port()
    try:
        client = boto3.client("s3", endpoint_url=f"http://{host}:{port}", region_name="us-east-1")
        client.create_bucket(Bucket="bucket")
        world.spoil(with_fields(peft_type="IA3"))
        for file in world.places["web"].iterdir():
            client.upload_file(str(file), "bucket", f"new/{file.name}")
        options = {"s3": {"endpoint_url": f"http://{host}:{port}"}}
        store = AdapterStore(AdapterArgs(allowed_urls=["s3://bucket"], storage_options=options), SHAPES, world.folder / "cache")
        with caplog.at_level(logging.INFO, "werkzeug"):
            assert "IA3" in refusal(store, AdapterRef(adapter_id="s3://bucket/new"))
    finally:
        moto.stop()
    assert f"GET /bucket/new/{CONFIG}" in caplog.text and f"HEAD /bucket/new/{WEIGHTS}" in caplog.text
    assert f"GET /bucket/new/{WEIGHTS}" not in caplog.text
