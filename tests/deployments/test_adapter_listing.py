"""Which adapters a store lists, over real folders and a real disk cache."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from loray.deployments import adapter_listing
from loray.deployments.adapter_files import content_hash
from loray.deployments.adapter_sources import place_of
from loray.deployments.adapter_store import AdapterStore
from loray.deployments.config import AdapterArgs
from loray.deployments.disk_cache import DiskCache, Entry
from loray.deployments.errors import AdapterFailed, AdapterNotFound
from loray.deployments.request import AdapterRef
from loray.models.adapter import AdapterSpec
from tests.deployments.peft_folder import OTHER_SHAPES, SHAPES, make_pipe, save_folder

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
HUB, REVISION, URL = "org/name", "org/name@v1", "https://shelf.example/poet"


class World:
    """Two roots of local folders and a disk cache that servers share."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.roots = [folder / "first", folder / "second"]
        self.cache = DiskCache(folder / "cache", 1 << 30)

    def store(self, shapes: dict[str, tuple[int, int]] = SHAPES, **args: Any) -> AdapterStore:
        arguments = AdapterArgs(**{"local_roots": self.roots, "allowed_urls": ["https://shelf.example"], **args})
        return AdapterStore(arguments, shapes, self.folder / "cache")

    def download(self, name: str, seed: int = 0, is_private: bool = False) -> Path:
        """As if a server had fetched it."""
        staged = self.folder / "staged"
        save_folder(staged, rank=4, seed=seed)
        place = place_of(AdapterRef(adapter_id=name, source="" if "://" in name else "hub"), "local")
        with self.cache.published(place.key, staged, Entry(place.name, content_hash(staged), "stamp", is_private)) as path:
            return path


def link(path: Path, to: Path) -> None:
    path.rename(to)
    path.symlink_to(to)


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


@pytest.mark.parametrize(("default_source", "listed"), [("local", [URL, "mine"]), ("hub", [URL, HUB, REVISION])])
def test_only_what_a_name_alone_leads_to_is_listed(world: World, default_source: str, listed: list[str]) -> None:
    save_folder(world.roots[1] / "mine", rank=4)
    places = {name: world.download(name, seed) for seed, name in enumerate((HUB, REVISION, URL))}
    places["mine"] = world.roots[1] / "mine"
    store = world.store(default_source=default_source)
    assert store.names() == listed
    assert [store.find(AdapterRef(adapter_id=name)).path for name in listed] == [str(places[name]) for name in listed]


def test_a_hub_adapter_that_needs_its_source_named_is_not_listed(world: World) -> None:
    path = world.download(HUB)
    store = world.store(default_source="local")
    with pytest.raises(AdapterNotFound):
        store.find(AdapterRef(adapter_id=HUB))
    assert store.names() == [] and store.find(AdapterRef(adapter_id=HUB, source="hub")).path == str(path)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda folder: (folder / WEIGHTS).write_bytes(b"torn"),
        lambda folder: (folder / WEIGHTS).unlink(),
        lambda folder: (folder / CONFIG).write_text("{}"),
        lambda folder: (folder / CONFIG).unlink(),
        lambda folder: ((folder / WEIGHTS).unlink(), make_pipe(folder / WEIGHTS)),
        lambda folder: folder.rename(folder.parent / "odd\nname"),
        lambda folder: link(folder, folder.parents[1] / "outside"),
        lambda folder: link(folder / WEIGHTS, folder.parents[1] / "outside"),
    ],
)
@pytest.mark.parametrize("was_listed", [True, False])
def test_a_folder_that_is_refused_is_not_listed_and_one_that_comes_is(world: World, spoil: Callable[[Path], Any], was_listed: bool) -> None:
    save_folder(world.roots[0] / "mine", rank=4)
    store = world.store()
    if was_listed:
        assert store.names() == ["mine"]
    spoil(world.roots[0] / "mine")
    assert store.names() == []
    save_folder(world.roots[1] / "late", rank=4)
    assert store.names() == ["late"]


def test_a_folder_behind_one_by_the_same_name_is_listed_when_it_is_served(world: World) -> None:
    for root in world.roots:
        save_folder(root / "twin", rank=4)
    (world.roots[0] / "twin" / WEIGHTS).unlink()
    store = world.store()
    with pytest.raises(AdapterFailed):
        store.find(AdapterRef(adapter_id="twin"))
    assert store.names() == []
    (world.roots[0] / "twin" / CONFIG).unlink()
    assert store.find(AdapterRef(adapter_id="twin")).num_pages == 1 and store.names() == ["twin"]


def test_nothing_that_this_server_refuses_is_listed_though_the_disk_is_shared(world: World) -> None:
    save_folder(world.roots[0] / "mine", rank=4)
    for name in (HUB, URL):
        world.download(name)
    picky, other = world.store(allowed_urls=["https://shelf.example/more"]), world.store(OTHER_SHAPES, default_source="hub")
    assert (picky.names(), other.names(), world.store(OTHER_SHAPES).names()) == (["mine"], [], [])
    with pytest.raises(AdapterFailed, match="may not read from there"):
        picky.find(AdapterRef(adapter_id=URL))
    assert len(picky.left_on_disk(set())) == len(other.left_on_disk(set())) == 2, "they take bytes, whoever may use them"


def test_a_download_that_becomes_private_or_goes_is_not_listed_from_then_on(world: World) -> None:
    store = world.store()
    for is_private in (False, True, False):
        world.download(URL, is_private=is_private)
        assert store.names() == ([] if is_private else [URL])
    store.remove(AdapterRef(adapter_id=URL))
    assert store.names() == []


@pytest.mark.parametrize("limit", ["LOOK_S", "DISK_S"])
def test_of_many_that_are_new_some_are_read_at_a_time_none_twice_and_none_is_listed_before(
    world: World, limit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapter_listing, limit, 0.0)  # one at a time
    for i in range(3):
        save_folder(world.roots[0] / f"bad{i}", rank=4)
        (world.roots[0] / f"bad{i}" / WEIGHTS).write_bytes(b"torn")
        save_folder(world.roots[0] / f"good{i}", rank=4)
    store = world.store()
    reads: list[Path] = []
    read = store._files._specs.read

    def noted(folder: Path) -> AdapterSpec:
        reads.append(folder)
        return read(folder)

    monkeypatch.setattr(store._files._specs, "read", noted)
    names, num_left = [], []
    for num_reads in range(1, 7):
        names.append(store.names())
        num_left.append(store.num_unlisted())
        good = sorted(folder.name for folder in reads if "good" in folder.name)
        assert names[-1] == good and len(reads) == len(set(reads)) == num_reads
    assert names[-1] == ["good0", "good1", "good2"] and num_left == [5, 4, 3, 2, 1, 0]
    assert store.names() == names[-1] and len(reads) == 6
    save_folder(world.roots[0] / "bad0", rank=4, seed=1)
    assert store.names() == ["bad0", *names[-1]] and len(reads) == 7, "its files are others now"


def test_who_asks_while_files_are_read_for_long_gets_the_last_answer(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter_listing, "DISK_S", 0.01)
    save_folder(world.roots[0] / "first", rank=4)
    store = world.store()
    assert store.names() == ["first"]
    save_folder(world.roots[0] / "second", rank=4)
    with store._listing._lock:
        assert store.names() == ["first"]
    assert store.names() == ["first", "second"]


def test_a_folder_that_others_may_read_from_now_on_is_looked_at_again(world: World) -> None:
    save_folder(world.roots[0] / "mine", rank=4)
    files = world.store()._files
    before = files.stamps(10)
    (world.roots[0] / "mine" / WEIGHTS).chmod(0o600)
    after = files.stamps(10)
    assert before != after == files.stamps(10)


def test_so_many_folders_are_looked_at_and_no_more(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter_listing, "MAX_FOLDERS", 2)
    for i in range(3):
        save_folder(world.roots[0] / f"a{i}", rank=4)
        world.download(f"{URL}{i}")
    names = world.store().names()
    assert [len([name for name in names if ("://" in name) == is_url]) for is_url in (False, True)] == [2, 2]
