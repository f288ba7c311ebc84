"""Adapters found for requests, over a real store that downloads from a real server."""

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest

from loray.deployments import adapter_files, adapter_finder, adapter_listing
from loray.deployments.adapter_finder import AdapterFinder
from loray.deployments.adapter_merging import MERGE_BYTES
from loray.deployments.adapter_store import AdapterStore
from loray.deployments.adapters import Adapter
from loray.deployments.config import AdapterArgs
from loray.deployments.errors import AdapterFailed, InvalidRequest, Overloaded
from loray.deployments.needed_folders import NeededFolders
from loray.deployments.request import AdapterRef, MergeRecipe
from tests.deployments.file_server import FileServer, Hold
from tests.deployments.merging_here import merge_here, merge_ref
from tests.deployments.peft_folder import SHAPES, save_folder

pytestmark = pytest.mark.slow  # downloads

HELD_S = 20  # at most, so that a failing test ends


class Store(AdapterStore):
    """Its searches stop with what they have found, each in front of the next of `doors`."""

    def __init__(self, url: str, cache: Path) -> None:
        super().__init__(AdapterArgs(allowed_urls=[url]), SHAPES, cache)
        self.doors: list[threading.Event] = []
        self.num_searches = 0

    def find(self, ref: AdapterRef, asked: float | None = None) -> Adapter:
        door = self.doors.pop(0) if self.doors else None
        adapter = super().find(ref, asked)
        self.num_searches += 1
        if door:
            door.wait(HELD_S)
        return adapter


class World:
    """One adapter on a web server, and who looks for it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "web"
        self.save(seed=0)
        self.web = FileServer(self._folder)
        self.ref = AdapterRef(adapter_id=f"{self.web.url}/mine")
        self.store = Store(self.web.url, folder / "cache")
        self.finder = AdapterFinder(self.store, max_waiting=10, needed=lambda adapter: nullcontext())

    def save(self, seed: int) -> None:
        save_folder(self._folder / "mine", rank=4, seed=seed)

    def save_as(self, name: str) -> None:
        save_folder(self._folder / name, rank=4, seed=0)

    async def held_search(self, ref: AdapterRef) -> tuple["asyncio.Task[Adapter]", threading.Event]:
        """One that has found what the source has now, and tells it when the door opens."""
        self.store.doors.append(door := threading.Event())
        num_searches = self.store.num_searches
        search = asyncio.create_task(self.finder.find(ref))
        while self.store.num_searches == num_searches:
            await asyncio.sleep(0.01)
        return search, door


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path)
    yield made
    made.web.close()


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, 30))


def noting(held: list[Adapter]) -> Callable[[Adapter], AbstractContextManager[None]]:
    """`held`: what is needed at the moment."""

    @contextmanager
    def needed(adapter: Adapter) -> Iterator[None]:
        held.append(adapter)
        yield
        held.remove(adapter)

    return needed


def test_until_it_is_forgotten_an_adapter_is_what_was_downloaded_and_then_what_the_source_has(world: World) -> None:
    async def work() -> None:
        old = await world.finder.find(world.ref)
        world.save(seed=1)
        assert (await world.finder.find(world.ref)).version == old.version
        await world.finder.forget(world.ref)
        assert (await world.finder.find(world.ref)).version != old.version

    run(work())


def test_what_is_to_be_asked_for_anew_takes_no_thread_of_those_for_what_is_here(world: World) -> None:
    async def work() -> None:
        old = await world.finder.find(world.ref)
        world.save(seed=1)
        await world.finder.forget(world.ref)
        world.finder._readers.shutdown()
        assert (await world.finder.find(world.ref)).version != old.version

    run(work())


def test_what_is_private_takes_no_thread_of_those_for_what_is_here(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its source is asked who may read it, which may take long."""

    async def work() -> None:
        found = await world.finder.find(world.ref)
        monkeypatch.setattr(world.store, "is_private", lambda ref: True)
        world.finder._readers.shutdown()
        assert (await world.finder.find(world.ref)).version == found.version

    run(work())


def test_a_folder_that_takes_long_to_read_leaves_threads_to_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    roots = [tmp_path / "root"]
    save_folder(roots[0] / "slow", rank=4)
    save_folder(roots[0] / "quick", rank=4, seed=1)
    door = threading.Event()
    content_hash = adapter_files.content_hash
    monkeypatch.setattr(adapter_files, "content_hash", lambda path: (path.name == "slow" and door.wait(HELD_S), content_hash(path))[1])
    store = AdapterStore(AdapterArgs(local_roots=roots), SHAPES, tmp_path / "cache")
    finder = AdapterFinder(store, max_waiting=1000, needed=lambda adapter: nullcontext())
    begun, find = [], store.find
    monkeypatch.setattr(store, "find", lambda ref, asked: (begun.append(ref), find(ref, asked))[1])

    async def work() -> None:
        slow = [asyncio.create_task(finder.find(AdapterRef(adapter_id="slow"))) for _ in range(2 * adapter_finder.NUM_READERS)]
        while len(begun) < adapter_finder.NUM_AT_A_PLACE:
            await asyncio.sleep(0.01)
        assert (await finder.find(AdapterRef(adapter_id="quick"))).adapter_id == "quick"
        assert not any(search.done() for search in slow)
        door.set()
        assert len({adapter.version for adapter in await asyncio.gather(*slow)}) == 1
        assert not finder._turns and not finder._num_at

    run(work())


def test_an_id_that_nobody_can_have_leaves_no_search_behind(world: World) -> None:
    async def work() -> None:
        before = asyncio.all_tasks()
        with pytest.raises(InvalidRequest):
            await world.finder.find(AdapterRef(adapter_id="ftp://somewhere/mine"))
        assert asyncio.all_tasks() == before

    run(work())


async def finds_the_new_one_beside_an_older_search(world: World, ref: AdapterRef) -> None:
    """When the source has something new and the world's own adapter was reloaded."""
    before, door = await world.held_search(ref)
    world.save(seed=1)
    await world.finder.forget(world.ref)
    after = await world.finder.find(ref)
    assert not before.done(), "nobody waited for it"
    door.set()
    assert (await before).version != after.version


@pytest.mark.parametrize("api_token", ["", "hf_mine"], ids=["as the admin", "with a token of his own"])
def test_who_asks_after_a_reload_does_not_join_a_search_that_began_before_it(world: World, api_token: str) -> None:
    run(finds_the_new_one_beside_an_older_search(world, AdapterRef(adapter_id=world.ref.adapter_id, api_token=api_token)))


def test_who_asks_for_a_merge_after_a_reload_of_its_part_gets_the_new_part(world: World) -> None:
    world.store.merge = merge_here
    half = AdapterRef(adapter_id="half", merge=MergeRecipe(adapter_ids=(world.ref.adapter_id,), weights=(0.5,)))
    run(finds_the_new_one_beside_an_older_search(world, half))


def rewritten(ref: AdapterRef, source: str) -> AdapterRef:
    """The same place: with the source beside the id, or with a slash behind it."""
    return AdapterRef(adapter_id=ref.adapter_id.removeprefix("http://") if source else f"{ref.adapter_id}/", source=source)


def half_of(part: AdapterRef) -> AdapterRef:
    return AdapterRef(adapter_id="half", source=part.source, merge=MergeRecipe(adapter_ids=(part.adapter_id,), weights=(0.5,)))


@pytest.mark.parametrize("source", ["", "http"])
def test_a_part_of_a_merge_is_new_after_a_reload_however_the_merge_writes_it(world: World, source: str) -> None:
    world.store.merge = merge_here
    run(finds_the_new_one_beside_an_older_search(world, half_of(rewritten(world.ref, source))))


def test_a_part_of_a_merge_is_searched_for_under_all_its_names_and_who_wants_it_alone_joins(world: World) -> None:
    world.store.merge = merge_here
    named, with_source = world.store.named(world.ref), rewritten(world.ref, "http")

    async def work() -> None:
        merge, door = await world.held_search(half_of(with_source))
        assert all(world.finder.is_searching(ref) for ref in (named, world.ref, with_source, rewritten(world.ref, "")))
        assert not world.finder.is_searching(AdapterRef(adapter_id=f"{world.web.url}/other"))
        assert world.finder.is_searching(half_of(world.ref))
        assert not world.finder.is_searching(merge_ref("merge of http://x/y", world.ref.adapter_id, weights=(1.0,)))
        plain = asyncio.create_task(world.finder.find(named))  # as requests are searched for
        await asyncio.sleep(0.01)
        door.set()
        await asyncio.gather(merge, plain)
        assert world.store.num_searches == 1 and not world.finder.is_searching(world.ref)

    run(work())


def test_the_parts_of_a_merge_stay_on_disk_until_it_is_made(world: World, tmp_path: Path) -> None:
    other = AdapterStore(AdapterArgs(allowed_urls=[world.web.url]), SHAPES, tmp_path / "cache")  # as if of another process
    unloaded: list[str] = []
    finder = AdapterFinder(world.store, max_waiting=10, needed=NeededFolders(world.store, unloaded.append).needed)

    def merge_late(folders: Any, *args: Any) -> None:
        other.remove(world.ref)
        merge_here(folders, *args)
        assert not unloaded

    world.store.merge = merge_late
    half = AdapterRef(adapter_id="half", merge=MergeRecipe(adapter_ids=(world.ref.adapter_id,), weights=(0.5,)))

    async def work() -> None:
        part = await finder.find(world.ref)
        assert (await finder.find(half)).rank == 4
        assert unloaded == [part.path] and Path(part.path).is_dir(), "it may go now"
        await finder.free(part.path)
        assert not Path(part.path).exists()

    run(work())


def test_a_merge_holds_no_part_while_it_waits_for_another(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several could wait for each other's room for ever."""
    world.store.merge = merge_here
    held, hold = [], world.store.hold
    monkeypatch.setattr(world.store, "hold", lambda path: (held.append(path), hold(path)))
    finder = AdapterFinder(world.store, max_waiting=10, needed=NeededFolders(world.store, lambda path: None).needed)
    world.save_as("other")
    other = f"{world.web.url}/other"
    recipe = MergeRecipe(adapter_ids=(world.ref.adapter_id, other), weights=(0.5, 0.5))

    async def work() -> None:
        first = await finder.find(world.ref)
        world.web.rules["/other/adapter_model.safetensors"] = waiting = Hold()
        merge = asyncio.create_task(finder.find(AdapterRef(adapter_id="both", merge=recipe)))
        assert await asyncio.to_thread(waiting.held.wait, 10) and not held
        waiting.released.set()
        await merge
        assert first.path in held and len(held) == 2

    run(work())


def test_merges_that_wait_until_others_are_made_hold_no_parts(world: World) -> None:
    """They would keep the room from those."""
    door, held = threading.Event(), list[Adapter]()
    world.store.merge = lambda *args: (door.wait(HELD_S), merge_here(*args))[1]
    world.finder._needed = noting(held)
    names = [f"part{number}" for number in range(adapter_finder.NUM_MERGES + 2)]
    for name in names:
        world.save_as(name)
    merges = [merge_ref(f"half of {name}", f"{world.web.url}/{name}", weights=(0.5,)) for name in names]

    async def work() -> None:
        searches = [asyncio.create_task(world.finder.find(merge)) for merge in merges]
        while not all((world.finder._place(merge), False) in world.finder._turns for merge in merges):
            await asyncio.sleep(0.01)
        assert len(held) == adapter_finder.NUM_MERGES
        door.set()
        await asyncio.gather(*searches)
        assert not held

    run(work())


def test_the_other_parts_of_a_merge_that_can_never_fit_on_disk_are_not_downloaded(world: World, tmp_path: Path) -> None:
    store = AdapterStore(AdapterArgs(allowed_urls=[world.web.url], disk_bytes=MERGE_BYTES), SHAPES, tmp_path / "small")
    store.merge = merge_here
    finder = AdapterFinder(store, max_waiting=10, needed=lambda adapter: nullcontext())
    world.save_as("other")
    both = merge_ref("both", world.ref.adapter_id, f"{world.web.url}/other", weights=(0.5, 0.5))

    async def work() -> None:
        with pytest.raises(AdapterFailed, match="both.*more than adapters.disk_bytes"):
            await finder.find(both)
        assert world.web.requests and not any("/other/" in path for _, path in world.web.requests)

    run(work())


def test_the_parts_of_a_merge_are_looked_for_with_the_tokens_of_who_asks(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.store.merge = merge_here
    refs, find = [], world.store.find
    monkeypatch.setattr(world.store, "find", lambda ref, asked: (refs.append(ref), find(ref, asked))[1])
    recipe = MergeRecipe(adapter_ids=(world.ref.adapter_id,), weights=(0.5,))

    async def work() -> None:
        await world.finder.find(AdapterRef(adapter_id="half", merge=recipe, api_token="secret"))

    run(work())
    assert [(ref.adapter_id, ref.api_token) for ref in refs] == [(world.ref.adapter_id, "secret")]


def test_equal_merges_of_two_names_are_two_versions(world: World) -> None:
    world.store.merge = merge_here
    recipe = MergeRecipe(adapter_ids=(world.ref.adapter_id,), weights=(0.5,))

    async def work() -> None:
        one, again, other = [await world.finder.find(AdapterRef(adapter_id=name, merge=recipe)) for name in ("one", "one", "other")]
        assert one.version == again.version != other.version and Path(one.path).name == Path(other.path).name

    run(work())


def test_a_search_that_a_reload_overtook_leaves_the_newer_one_to_be_joined(world: World) -> None:
    async def work() -> None:
        before, first_door = await world.held_search(world.ref)
        await world.finder.forget(world.ref)
        after, second_door = await world.held_search(world.ref)
        first_door.set()
        await before
        third = asyncio.create_task(world.finder.find(world.ref))
        await asyncio.sleep(0)
        second_door.set()
        assert (await third).version == (await after).version and world.store.num_searches == 2

    run(work())


def test_forgetting_one_adapter_leaves_the_searches_of_others_to_be_joined(world: World) -> None:
    async def work() -> None:
        search, door = await world.held_search(world.ref)
        await world.finder.forget(AdapterRef(adapter_id=f"{world.web.url}/other"))
        second = asyncio.create_task(world.finder.find(world.ref))
        await asyncio.sleep(0)
        door.set()
        assert (await second).version == (await search).version and world.store.num_searches == 1

    run(work())


def test_new_folders_that_there_was_no_time_for_are_looked_at_without_being_asked_for_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapter_listing, "LOOK_S", 0.0)  # one at a time
    monkeypatch.setattr(adapter_finder, "REST_S", 0.0)
    names = [f"a{i}" for i in range(4)]
    for name in names:
        save_folder(tmp_path / name, rank=4)

    async def work() -> None:
        store = AdapterStore(AdapterArgs(local_roots=[tmp_path]), SHAPES, tmp_path / "cache")
        finder = AdapterFinder(store, max_waiting=10, needed=lambda adapter: nullcontext())
        assert len(await finder.names()) == 1
        while store.num_unlisted():
            await asyncio.sleep(0.001)
        assert await finder.names() == names

    run(work())


def test_what_is_on_disk_does_not_wait_for_downloads_however_many(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    door, find, begun = threading.Event(), world.store.find, []

    def slow_find(ref: AdapterRef, asked: float | None = None) -> Adapter:
        if ref != world.ref:
            begun.append(ref)
            door.wait(HELD_S)
        return find(ref, asked)

    async def work() -> None:
        monkeypatch.setattr(adapter_finder, "NUM_FINDERS", 4)
        finder = AdapterFinder(world.store, max_waiting=10, needed=lambda adapter: nullcontext())
        await finder.find(world.ref)
        monkeypatch.setattr(world.store, "find", slow_find)
        slow = [asyncio.create_task(finder.find(AdapterRef(adapter_id=f"{world.web.url}/slow{i}"))) for i in range(5)]
        while len(begun) < adapter_finder.NUM_FINDERS:
            await asyncio.sleep(0.01)
        assert (await finder.find(world.ref)).rank == 4
        assert not any(task.done() for task in slow)
        door.set()
        await asyncio.gather(*slow, return_exceptions=True)

    run(work())


def test_merges_that_nobody_waits_for_any_more_are_not_made(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    door, made, names = threading.Event(), [], [f"other{number}" for number in range(adapter_finder.NUM_MERGES)]
    for name in names:
        world.save_as(name)

    def merged(ref: AdapterRef, parts: list[Adapter]) -> Adapter:
        made.append(ref.adapter_id)
        door.wait(HELD_S)
        return AdapterStore.merged(world.store, ref, parts)

    def merge(weight: float, adapter_id: str = world.ref.adapter_id) -> AdapterRef:
        return merge_ref(f"merge of {adapter_id}", adapter_id, weights=(weight,))

    async def run() -> None:
        others = [f"{world.web.url}/{name}" for name in names]
        running = [asyncio.create_task(world.finder.find(merge(1, adapter_id))) for adapter_id in others]
        while len(made) < len(running):
            await asyncio.sleep(0.01)
        left = [asyncio.create_task(world.finder.find(merge(100 + number))) for number in range(20)]
        joined = [asyncio.create_task(world.finder.find(merge(100))), asyncio.create_task(world.finder.find(merge(5000)))]
        while world.finder._num_waiting[world.finder._place(merge(1)), False] < len(left) + len(joined):
            await asyncio.sleep(0.01)
        for task in left:
            task.cancel()
        await asyncio.wait(left)
        door.set()
        await asyncio.gather(*running, *joined, world.finder.find(merge(101)))
        assert len(made) == len(running) + 3, "those that are asked for"
        assert not world.finder._searches and not world.finder._num_asking and not world.finder._num_waiting

    world.store.merge = merge_here
    monkeypatch.setattr(world.store, "merged", merged)
    monkeypatch.setattr(world.finder, "_max_waiting", 100)
    asyncio.run(run())


def test_merges_that_are_given_up_take_no_thread_each_while_a_part_of_theirs_is_downloaded(world: World) -> None:
    async def work() -> None:
        world.store.doors.append(door := threading.Event())
        for number in range(20):
            merge = asyncio.create_task(world.finder.find(merge_ref(f"merge {number}", world.ref.adapter_id, weights=(1.0,))))
            while not world.store.num_searches:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0)
            merge.cancel()
            await asyncio.wait([merge])
        assert world.store.num_searches == 1
        plain = asyncio.create_task(world.finder.find(world.store.named(world.ref)))  # as requests are searched for
        await asyncio.sleep(0.01)
        door.set()
        assert (await plain).rank == 4 and world.store.num_searches == 1, "it joins the one that runs"
        assert not world.finder._num_asking and not world.finder._num_waiting

    run(work())


def test_a_merge_on_disk_waits_for_none_that_is_made_and_merges_of_some_hold_up_none_of_others(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    door, others = threading.Event(), f"{world.web.url}/others"
    world.save_as("others")

    def merge(weight: float, num_times: int = 1) -> AdapterRef:
        ids = [world.ref.adapter_id] * num_times
        return merge_ref(" ".join(ids), *ids, weights=(weight,) * num_times)

    def merge_late(*args: Any) -> None:
        assert 9.0 not in args[1] or door.wait(HELD_S)
        merge_here(*args)

    async def run() -> None:
        await world.finder.find(merge(1))
        held = [asyncio.create_task(world.finder.find(merge(9)))]
        while not world.finder._merging:
            await asyncio.sleep(0.01)
        held += [asyncio.create_task(world.finder.find(merge(weight))) for weight in range(10, 50)]
        held += [asyncio.create_task(world.finder.find(merge(9, num_times))) for num_times in range(2, 30)]
        await world.finder.find(merge(1))
        await world.finder.find(merge_ref("others", others, weights=(2,)))
        assert len(world.finder._merging) == 1 and not any(task.done() for task in held)
        for task in held:
            task.cancel()
        await asyncio.wait(held)
        door.set()

    world.store.merge = merge_late
    monkeypatch.setattr(world.finder, "_max_waiting", 100)
    asyncio.run(run())


def test_merges_of_one_adapter_alone_do_not_hold_up_its_search(world: World) -> None:
    door = threading.Event()

    async def run() -> None:
        merge = asyncio.create_task(world.finder.find(merge_ref("merge", world.ref.adapter_id, weights=(1.0,))))
        while not world.finder._merging:
            await asyncio.sleep(0.01)
        waiting = asyncio.create_task(world.finder.find(merge_ref("merge", world.ref.adapter_id, weights=(2.0,))))
        await asyncio.sleep(0.05)
        world.save(seed=1)
        await world.finder.forget(world.ref)
        assert await world.finder.find(world.ref) and not merge.done()
        door.set()
        await asyncio.wait([merge, waiting])

    world.store.merge = lambda *args: (door.wait(HELD_S), merge_here(*args))[1]
    asyncio.run(run())


def test_merges_of_the_same_adapters_wait_as_those_of_one_however_they_are_written(world: World) -> None:
    door = threading.Event()

    async def run() -> None:
        def ask(num_times: int) -> "asyncio.Task[Adapter]":
            ids = [world.ref.adapter_id] * num_times
            return asyncio.create_task(world.finder.find(merge_ref(" ".join(ids), *ids, weights=(1.0,) * num_times)))

        waiting = [ask(num_times) for num_times in range(1, 11)]  # as many as may
        while not world.finder._merging:
            await asyncio.sleep(0.01)
        with pytest.raises(Overloaded):
            await ask(11)
        door.set()
        await asyncio.gather(*waiting)

    world.store.merge = lambda *args: (door.wait(HELD_S), merge_here(*args))[1]
    asyncio.run(run())


def test_what_is_merged_though_its_caller_has_left_is_told_of_and_keeps_its_parts(world: World) -> None:
    door, held = threading.Event(), list[Adapter]()

    def merge_late(*args: Any) -> None:
        assert door.wait(HELD_S)
        merge_here(*args)

    async def run() -> None:
        half = merge_ref("half", world.ref.adapter_id, weights=(0.5,))
        left = asyncio.create_task(world.finder.find(half))
        while not world.finder._merging:
            await asyncio.sleep(0.01)
        left.cancel()
        await asyncio.wait([left])
        assert world.finder.searching() == [half] and len(held) == 1
        again = asyncio.create_task(world.finder.find(half))
        door.set()
        assert (await again).rank == 4
        await world.finder.ended(half)
        assert not world.finder.searching() and not held and not world.finder._merging

    world.store.merge = merge_late
    world.finder._needed = noting(held)
    asyncio.run(run())


@pytest.mark.parametrize("is_private", [False, True])
def test_a_merge_of_what_is_private_is_private(world: World, is_private: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def find(ref: AdapterRef, asked: float | None = None) -> Adapter:
        adapter = AdapterStore.find(world.store, ref, asked)
        adapter.is_private = is_private
        return adapter

    world.store.merge = merge_here
    monkeypatch.setattr(world.store, "find", find)
    half = merge_ref("half", world.ref.adapter_id, weights=(0.5,))
    assert [asyncio.run(world.finder.find(half)).is_private for _ in range(2)] == [is_private] * 2


def test_one_adapter_takes_few_finders_however_many_tokens_ask_for_it(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    door, find, begun = threading.Event(), world.store.find, []

    def slow_find(ref: AdapterRef, asked: float | None = None) -> Adapter:
        begun.append(ref.api_token)
        if ref.api_token:
            door.wait(HELD_S)
        return find(ref, asked)

    async def work() -> None:
        monkeypatch.setattr(adapter_finder, "NUM_FINDERS", adapter_finder.NUM_AT_A_PLACE + 1)
        finder = AdapterFinder(world.store, max_waiting=100, needed=lambda adapter: nullcontext())
        monkeypatch.setattr(world.store, "find", slow_find)
        world.save_as("other")
        slow = [asyncio.create_task(finder.find(AdapterRef(adapter_id=world.ref.adapter_id, api_token=f"hf_{i}"))) for i in range(30)]
        while len(begun) < adapter_finder.NUM_AT_A_PLACE:
            await asyncio.sleep(0.01)
        assert (await finder.find(AdapterRef(adapter_id=f"{world.web.url}/other"))).rank == 4
        assert len(begun) == adapter_finder.NUM_AT_A_PLACE + 1
        for task in slow[:20]:
            task.cancel()
        await asyncio.wait(slow[:20])
        door.set()
        await asyncio.gather(*slow[20:])
        assert len(begun) == adapter_finder.NUM_AT_A_PLACE + 1 + 10, "who has left before his search began is not searched for"
        while finder._searches:  # that nobody waits for
            await asyncio.sleep(0.01)
        assert not finder._turns and not finder._num_at and not finder._unbegun

    run(work())


def test_listings_that_are_asked_for_at_once_are_one(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[float] = []

    def names() -> list[str]:
        calls.append(0)
        time.sleep(0.2)
        return ["mine"]

    async def work() -> None:
        monkeypatch.setattr(world.store, "names", names)
        assert await asyncio.gather(*(world.finder.names() for _ in range(20))) == [["mine"]] * 20
        assert len(calls) == 1

    run(work())


def test_new_folders_are_looked_at_by_one_however_often_a_listing_is_asked_for(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(world.store, "names", lambda: [])
    monkeypatch.setattr(world.store, "num_unlisted", lambda: 1)

    async def work() -> None:
        await world.finder.names()
        looking = world.finder._listing
        await world.finder.names()
        assert looking and not looking.done() and world.finder._listing is looking
        looking.cancel()

    run(work())


def test_one_place_has_as_few_turns_after_some_have_left(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    doors, begun = {token: threading.Event() for token in ("hf_a", "hf_b", "hf_c")}, []
    when_asked = {}

    def slow_find(ref: AdapterRef, asked: float | None = None) -> Adapter:
        begun.append(ref.api_token)
        when_asked[ref.api_token] = asked
        doors[ref.api_token].wait(HELD_S)
        return Adapter("mine", "version", "folder", 1)

    async def work() -> None:
        monkeypatch.setattr(adapter_finder, "NUM_AT_A_PLACE", 1)
        monkeypatch.setattr(world.store, "find", slow_find)
        finder, place = world.finder, (world.store.place_key(world.ref), False)
        first, second, third = (finder.find(AdapterRef(adapter_id=world.ref.adapter_id, api_token=token)) for token in doors)
        tasks = [asyncio.create_task(first)]
        while not begun:
            await asyncio.sleep(0.01)
        tasks.append(asyncio.create_task(second))
        while finder._num_at[place] < 2:
            await asyncio.sleep(0.01)
        doors["hf_a"].set()
        await tasks[0]
        tasks.append(asyncio.create_task(third))
        while len(begun) < 2 or finder._num_at[place] < 2:
            await asyncio.sleep(0.01)
        assert len(finder._unbegun) == 1, "the third waits for the second"
        is_waiting = time.monotonic()
        for door in doors.values():
            door.set()
        await asyncio.gather(*tasks)
        assert when_asked["hf_c"] < is_waiting, "who waits for a turn waits for room meanwhile"

    run(work())


def test_the_parts_of_a_merge_come_from_the_source_that_is_named_with_it(world: World) -> None:
    world.store.merge = merge_here
    scheme, _, address = world.ref.adapter_id.partition("://")
    merge = AdapterRef(adapter_id="half", source=scheme, merge=MergeRecipe(adapter_ids=(address,), weights=(0.5,)))

    async def work() -> None:
        assert (await world.finder.find(merge)).rank == 4

    run(work())
