import os
import shutil
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from loray.deployments import disk_cache, disk_room, tier_uses
from loray.deployments.adapter_files import content_hash
from loray.deployments.adapter_sources import EXTRA_FILES
from loray.deployments.adapter_status import TierUse
from loray.deployments.disk_cache import DiskCache, Entry, is_whole
from loray.deployments.disk_room import DiskBusy, DiskFull
from loray.deployments.tier_uses import TierUses
from tests.deployments.peft_folder import save_folder

KEY = "hub-a-0123"


@pytest.fixture(autouse=True)
def short_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """What one has found counts for nobody else."""
    monkeypatch.setattr(disk_room, "LOOK_S", 0.0)
    monkeypatch.setattr(disk_room, "LOOK_SHARE", 0)


@pytest.fixture
def long_looks(short_looks: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """What one has found counts until something changes."""
    monkeypatch.setattr(disk_room, "LOOK_SHARE", 1e9)


def folder_bytes(tmp_path: Path) -> int:
    """Of one adapter as `keep` makes it."""
    save_folder(tmp_path / "measured", rank=4)
    return sum(file.stat().st_size for file in (tmp_path / "measured").iterdir())


def keep(cache: DiskCache, key: str, num_bytes: int, seed: int = 0, last_used: float | None = None, patience_s: float = 0.0) -> Path:
    with cache.only_one(key), cache.staging(key) as small:
        staged = cache.grow(small, num_bytes, until=time.monotonic() + patience_s)
        save_folder(staged, rank=4, seed=seed)
        entry = Entry(name=key, version=content_hash(staged), stamp="s", is_private=False)
        with cache.published(key, staged, entry) as path:
            assert is_whole(path, entry.version)
    if last_used is not None:
        os.utime(path, (last_used, last_used))
    return path


@contextmanager
def downloaded(cache: DiskCache, num_bytes: int) -> Iterator[tuple[Path, Entry]]:
    """What is to be published as KEY."""
    with cache.only_one(KEY), cache.staging(KEY, num_bytes) as staged:
        save_folder(staged, rank=4)
        yield staged, Entry(name=KEY, version=content_hash(staged), stamp="s", is_private=False)


def full_of_what_is_held(tmp_path: Path, num: int = 2) -> tuple[DiskCache, list[Path], int]:
    """The cache, its versions, and the bytes of one."""
    size = folder_bytes(tmp_path)
    cache = DiskCache(tmp_path / "cache", num * size)
    paths = [keep(cache, f"hub-{i}", size, seed=i) for i in range(num)]
    for path in paths:
        cache.hold(str(path))
    return cache, paths, size


def test_an_entry_is_read_again_only_when_it_has_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache, other = DiskCache(tmp_path / "cache", 1 << 20), DiskCache(tmp_path / "cache", 1 << 20)
    keep(other, KEY, folder_bytes(tmp_path))
    first, reads = cache.entry(KEY), []
    read_bytes = Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda file: reads.append(file) or read_bytes(file))
    assert cache.entry(KEY) == first and not reads
    keep(other, KEY, folder_bytes(tmp_path), seed=1)
    reads.clear()
    second = cache.entry(KEY)
    assert second and first and second.version != first.version and len(reads) == 1
    other.remove(KEY)
    assert cache.entry(KEY) is None and not cache._entries


def test_what_was_published_is_found_by_another_cache_on_the_same_folder(tmp_path: Path) -> None:
    path = keep(DiskCache(tmp_path / "cache", 1 << 20), KEY, folder_bytes(tmp_path))
    again = DiskCache(tmp_path / "cache", 1 << 20)
    entry = again.entry(KEY)
    assert entry is not None and again.path(KEY, entry.version) == path and is_whole(path, entry.version)
    assert again.num_bytes(KEY) == folder_bytes(tmp_path)
    assert {key: entry.name for key, entry in again.entries().items()} == {KEY: KEY}


def test_the_least_recently_used_is_evicted_first_and_what_is_in_use_never(tmp_path: Path) -> None:
    size = folder_bytes(tmp_path)
    cache = DiskCache(tmp_path / "cache", 3 * size)
    paths = [keep(cache, f"hub-{i}", size, seed=i, last_used=1000.0 + i) for i in range(3)]
    cache.hold(str(paths[0]))
    cache.touch(paths[1])
    keep(cache, "hub-3", size, seed=3)
    assert [path.exists() for path in paths] == [True, True, False]
    assert cache.entry("hub-2") is None and cache.entry("hub-1") is not None


def test_the_version_that_a_download_is_to_replace_goes_last(tmp_path: Path) -> None:
    """Where the new one does not come, it is served on."""
    size = folder_bytes(tmp_path)
    cache = DiskCache(tmp_path / "cache", 2 * size)
    oldest, other = keep(cache, KEY, size, last_used=1000.0), keep(cache, "hub-1", size, seed=1, last_used=2000.0)
    with cache.only_one(KEY), cache.staging(KEY, size):
        assert oldest.exists() and not other.exists()
    with cache.only_one(KEY), cache.staging(KEY, 2 * size):
        assert not oldest.exists(), "there is no other room"


def test_when_all_stays_in_use_nothing_is_evicted_and_the_newcomer_is_refused(tmp_path: Path) -> None:
    cache, paths, size = full_of_what_is_held(tmp_path)
    with pytest.raises(DiskBusy, match=f"{size} bytes.*in use or pinned take {2 * size} and downloads under way 0"):
        keep(cache, "hub-2", size)
    assert all(path.exists() for path in paths)


def test_a_newcomer_waits_until_somebody_needs_his_files_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache, paths, size = full_of_what_is_held(tmp_path)
    looks = threading.Semaphore(0)
    monkeypatch.setattr(cache._room, "looked", lambda *found: looks.release())
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(keep, cache, "hub-2", size, seed=2, patience_s=30)
        assert all(looks.acquire(timeout=10) for _ in range(2))
        assert not waiting.done() and all(path.exists() for path in paths)
        cache.let_go(str(paths[1]))
        assert waiting.result(10).exists()
    assert [path.exists() for path in paths] == [True, False]


def test_all_who_wait_have_the_room_that_is_let_go_however_many_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_room, "LOOK_S", 1.0)
    num = 12
    cache, paths, size = full_of_what_is_held(tmp_path, num)
    began = time.monotonic()
    with ThreadPoolExecutor(num) as threads:
        waiting = [threads.submit(keep, cache, f"hub-new{i}", size, seed=num + i, patience_s=60) for i in range(num)]
        while not cache._room._found.num_held:
            time.sleep(0.01)
        for path in paths:
            cache.let_go(str(path))
        assert all(one.result(60).exists() for one in waiting)
    assert time.monotonic() - began < num / 2, "nobody waits the longer, the more do"


def test_what_is_published_stays_while_it_is_looked_at(tmp_path: Path) -> None:
    """Nobody holds it yet."""
    size = folder_bytes(tmp_path)
    cache = DiskCache(tmp_path / "cache", size)
    with downloaded(cache, size) as (staged, entry), cache.published(KEY, staged, entry) as path:
        with pytest.raises(DiskBusy):
            keep(DiskCache(tmp_path / "cache", size), "hub-other", size, seed=1)
        cache.hold(str(path))
        cache.let_go(str(path))  # another one's
        with pytest.raises(DiskBusy):
            keep(cache, "hub-other", size, seed=1)
    assert keep(cache, "hub-other", size, seed=1).exists() and not path.exists()


def test_many_that_wait_for_room_look_for_it_about_as_often_as_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_room, "LOOK_S", 0.05)
    monkeypatch.setattr(disk_room, "LOOK_SHARE", 100)
    size, num, looks = folder_bytes(tmp_path), 20, []
    cache = DiskCache(tmp_path / "cache", size)
    cache.hold(str(keep(cache, KEY, size)))
    delete_left = cache._delete_left
    monkeypatch.setattr(cache, "_delete_left", lambda: (looks.append(1), delete_left()))
    began = time.monotonic()
    with ThreadPoolExecutor(num) as threads:
        waiting = [threads.submit(keep, cache, f"hub-{i}", size, patience_s=1) for i in range(num)]
        for one in waiting:
            with pytest.raises(DiskBusy):
                one.result()
    seconds = time.monotonic() - began
    assert len(looks) < seconds / disk_room.LOOK_S + 4, "neither those who come nor those who give up look at all folders once more"
    assert seconds < 10, "nobody waits longer, however many there are"


@pytest.mark.usefixtures("long_looks")
def test_what_was_in_use_a_moment_ago_is_room_as_soon_as_it_is_let_go(tmp_path: Path) -> None:
    cache, paths, size = full_of_what_is_held(tmp_path)
    with pytest.raises(DiskBusy):
        keep(cache, KEY, size, seed=5)
    with pytest.raises(DiskBusy, match=f"in use or pinned take {2 * size} and downloads under way 0"):
        keep(cache, KEY, size - 1, seed=5)
    cache.let_go(str(paths[0]))
    assert keep(cache, KEY, size, seed=5).exists()


def test_who_has_waited_for_his_turn_to_look_does_not_look_once_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However much is let go meanwhile: else each of many would, one after another, beyond the time that they have."""
    cache, paths, size = full_of_what_is_held(tmp_path)
    looks, num = [], 10
    delete_left = cache._delete_left

    def look() -> None:
        while waiting.count(True) < num:
            time.sleep(0.01)
        looks.append(1)
        delete_left()
        cache._room.changed()

    monkeypatch.setattr(cache, "_delete_left", look)
    waiting = list[bool]()

    def wait(i: int) -> None:
        with cache.only_one(f"hub-new{i}"), cache.staging(f"hub-new{i}") as staged:
            waiting.append(True)
            with pytest.raises(DiskBusy):
                cache.grow(staged, size)

    with ThreadPoolExecutor(num) as threads:
        list(threads.map(wait, range(num)))
    assert len(looks) < num / 2


@pytest.mark.usefixtures("long_looks")
def test_who_gives_up_makes_nobody_look_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache, _, size = full_of_what_is_held(tmp_path)
    looks, delete_left = [], cache._delete_left
    monkeypatch.setattr(cache, "_delete_left", lambda: (looks.append(1), delete_left()))
    for i in range(5):
        with pytest.raises(DiskBusy):
            keep(cache, f"hub-more-{i}", size, seed=5)
    assert len(looks) == 1


@pytest.mark.usefixtures("long_looks")
def test_a_download_that_ends_makes_room(tmp_path: Path) -> None:
    size = folder_bytes(tmp_path)
    cache = DiskCache(tmp_path / "cache", size)
    with cache.only_one(KEY), cache.staging(KEY, size), pytest.raises(DiskBusy, match=f"downloads under way {size}"):
        keep(cache, "hub-other", size)
    assert keep(cache, "hub-other", size).exists()


@pytest.mark.usefixtures("long_looks")
def test_what_is_published_is_room_for_others_after_its_block(tmp_path: Path) -> None:
    size = folder_bytes(tmp_path)
    cache = DiskCache(tmp_path / "cache", size)
    busy = pytest.raises(DiskBusy, match=f"in use or pinned take {size}")
    with downloaded(cache, size) as (staged, entry), cache.published(KEY, staged, entry), busy:
        keep(cache, "hub-other", size, seed=1)
    assert keep(cache, "hub-other", size, seed=1).exists()


@pytest.mark.usefixtures("long_looks")
def test_what_is_let_go_while_another_looks_is_room_for_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache, paths, size = full_of_what_is_held(tmp_path)
    are_free = cache._locks.are_free
    monkeypatch.setattr(cache._locks, "are_free", lambda names: (are_free(names), cache.let_go(str(paths[0])))[0])
    with pytest.raises(DiskBusy):
        keep(cache, KEY, size, seed=5)
    assert keep(cache, KEY, size, seed=5).exists()


def test_a_version_of_which_only_the_entry_is_left_is_not_there(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path / "cache", 1 << 20)
    path = keep(cache, KEY, folder_bytes(tmp_path))
    assert cache.has(KEY) and not cache.has("hub-other")
    shutil.rmtree(path)
    assert cache.entry(KEY) and not cache.has(KEY)


def test_both_versions_may_fill_the_disk_exactly(tmp_path: Path) -> None:
    size = folder_bytes(tmp_path)
    cache = DiskCache(tmp_path / "cache", 2 * size)
    served, other = keep(cache, KEY, size), keep(cache, "hub-other", size, seed=1)
    cache.hold(str(other))
    with pytest.raises(DiskBusy):
        keep(cache, KEY, size, seed=2)
    assert served.exists()
    cache.let_go(str(other))
    assert keep(cache, KEY, size, seed=2).exists() and served.exists() and not other.exists()


def test_what_has_been_disowned_is_in_nobodys_way(tmp_path: Path) -> None:
    size = folder_bytes(tmp_path)
    cache = DiskCache(tmp_path / "cache", 2 * size)
    broken, other = keep(cache, KEY, size), keep(cache, "hub-other", size, seed=1)
    cache.hold(str(other))
    cache.disown(KEY)
    assert not cache.has(KEY) and broken.exists()
    assert keep(cache, KEY, size, seed=2).exists() and not broken.exists()


@pytest.mark.usefixtures("long_looks")
def test_a_version_that_is_served_stays_where_another_keeps_the_next_from_coming(tmp_path: Path) -> None:
    size = folder_bytes(tmp_path)
    cache = DiskCache(tmp_path / "cache", int(2.5 * size))
    served, other = keep(cache, KEY, size), keep(cache, "hub-other", size, seed=1)
    cache.hold(str(other))
    with pytest.raises(DiskBusy, match=f"in use or pinned take {2 * size} "):
        keep(cache, KEY, size, seed=2)
    assert served.exists() and cache.has(KEY)
    assert keep(cache, "hub-third", size, seed=3).exists() and not served.exists() and not cache.has(KEY), "it is in nobody else's way"


def test_an_older_version_makes_room_for_the_next(tmp_path: Path) -> None:
    size = folder_bytes(tmp_path)
    cache = DiskCache(tmp_path / "cache", int(2.5 * size))
    paths = [keep(cache, KEY, size, seed=seed) for seed in range(3)]
    assert [path.exists() for path in paths] == [False, True, True]


def test_what_finds_no_room_beside_what_is_in_use_evicts_nothing(tmp_path: Path) -> None:
    size = folder_bytes(tmp_path)
    cache = DiskCache(tmp_path / "cache", 3 * size)
    paths = [keep(cache, f"hub-{i}", size, seed=i) for i in range(3)]
    cache.hold(str(paths[2]))
    with pytest.raises(DiskBusy, match=f"in use or pinned take {size} "):
        keep(cache, "hub-large", 3 * size)
    assert all(path.exists() for path in paths)


def test_what_somebody_holds_since_it_was_looked_at_makes_no_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache, paths, size = full_of_what_is_held(tmp_path)
    monkeypatch.setattr(cache._locks, "are_free", lambda names: [True] * len(names))  # a moment ago
    with pytest.raises(DiskBusy, match=f"in use or pinned take {2 * size} "):
        keep(cache, "hub-2", size)
    assert all(path.exists() for path in paths)


def test_what_can_never_fit_evicts_nothing(tmp_path: Path) -> None:
    size = folder_bytes(tmp_path)
    cache = DiskCache(tmp_path / "cache", 2 * size)
    path = keep(cache, KEY, size)
    with pytest.raises(DiskFull, match=rf"{3 * size} bytes on disk, more than adapters.disk_bytes \({2 * size}\)$"):
        keep(cache, "hub-large", 3 * size)
    assert path.exists()


def test_downloads_under_way_count(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path / "cache", 100)
    with cache.only_one("hub-a"), cache.staging("hub-a", 60):
        with (
            pytest.raises(DiskBusy, match="in use or pinned take 0 and downloads under way 60"),
            cache.only_one("hub-b"),
            cache.staging("hub-b", 60),
        ):
            pass
        with cache.only_one("hub-c"), cache.staging("hub-c", 40):
            pass


def test_a_download_that_grows_counts_from_then_on_and_keeps_what_has_come(tmp_path: Path) -> None:
    size = folder_bytes(tmp_path)
    cache = DiskCache(tmp_path / "cache", size)
    path = keep(cache, KEY, size)
    with cache.only_one("hub-a.b"), cache.staging("hub-a.b") as small:
        (small / "adapter_config.json").write_text("{}")
        assert path.exists()
        grown = cache.grow(small, size)
        assert not path.exists() and not small.exists() and (grown / "adapter_config.json").read_text() == "{}"
        with pytest.raises(DiskBusy, match=f"downloads under way {size}"):
            keep(cache, KEY, 1)
    assert not list((tmp_path / "cache" / "partial").iterdir())


def test_what_a_dead_process_left_half_done_does_not_count(tmp_path: Path) -> None:
    left = tmp_path / "cache" / "partial" / "hub-dead.90"
    left.mkdir(parents=True)
    cache = DiskCache(tmp_path / "cache", 100)
    with cache.only_one("hub-a"), cache.staging("hub-a", 60):
        assert not left.exists()


def test_what_a_process_that_died_since_left_of_the_same_key_is_gone(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path / "cache", 100)
    with cache.only_one("hub-b"), cache.staging("hub-b", 10):
        pass  # now this process has cleaned once
    left = tmp_path / "cache" / "partial" / "hub-a.90"
    left.mkdir()
    with cache.only_one("hub-a"), cache.staging("hub-a", 60):
        assert not left.exists()


def test_another_keys_download_counts_while_its_process_lives_and_is_deleted_when_it_died(tmp_path: Path) -> None:
    cache, other = (DiskCache(tmp_path / "cache", 100) for _ in range(2))
    with cache.only_one("hub-b"), cache.staging("hub-b", 10):
        pass  # now this process has cleaned once
    left = tmp_path / "cache" / "partial" / "hub-other.90"
    left.mkdir()
    with other.only_one("hub-other"):
        with pytest.raises(DiskBusy, match="downloads under way 90"), cache.only_one("hub-a"), cache.staging("hub-a", 60):
            pass
        assert left.is_dir()
    with cache.only_one("hub-a"), cache.staging("hub-a", 60):
        assert not left.exists()


def test_what_another_process_is_downloading_is_left_alone(tmp_path: Path) -> None:
    one, other = (DiskCache(tmp_path / "cache", 100) for _ in range(2))
    with one.only_one("hub-a"), one.staging("hub-a", 40) as busy, other.only_one("hub-b"), other.staging("hub-b", 40):
        assert busy.is_dir()


def test_a_failed_download_leaves_nothing(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path / "cache", 1000)
    with pytest.raises(RuntimeError), cache.only_one(KEY), cache.staging(KEY, 100) as staged:
        (staged / "adapter_config.json").write_text("half")
        raise RuntimeError
    assert cache.entry(KEY) is None and cache.num_bytes(KEY) == 0 and not list((tmp_path / "cache" / "partial").iterdir())


def test_new_content_is_another_folder_and_the_old_one_stays_for_who_uses_it(tmp_path: Path) -> None:
    size = folder_bytes(tmp_path)
    cache = DiskCache(tmp_path / "cache", 10 * size)
    old, new = keep(cache, KEY, size, seed=0), keep(cache, KEY, size, seed=1)
    assert old != new and old.is_dir() and new.is_dir()
    entry = cache.entry(KEY)
    assert entry is not None and entry.version == new.name


def test_equal_content_leaves_the_files_that_are_there(tmp_path: Path) -> None:
    size = folder_bytes(tmp_path)
    cache = DiskCache(tmp_path / "cache", 10 * size)
    before = (keep(cache, KEY, size) / "adapter_model.safetensors").stat().st_ino
    assert (keep(cache, KEY, size) / "adapter_model.safetensors").stat().st_ino == before


def test_equal_content_mends_a_broken_folder(tmp_path: Path) -> None:
    size = folder_bytes(tmp_path)
    cache = DiskCache(tmp_path / "cache", 10 * size)
    path = keep(cache, KEY, size)
    (path / "adapter_model.safetensors").write_bytes(b"broken")
    assert not is_whole(path, path.name)
    assert is_whole(keep(cache, KEY, size), path.name)


def test_removing_frees_all_versions_but_those_that_are_held_and_these_when_they_are_let_go(tmp_path: Path) -> None:
    size = folder_bytes(tmp_path)
    cache, other = (DiskCache(tmp_path / "cache", 10 * size) for _ in range(2))
    old, new = keep(cache, KEY, size, seed=0), keep(cache, KEY, size, seed=1)
    for holder in (cache, other):
        holder.hold(str(new))
    cache.remove(KEY)
    assert cache.entry(KEY) is None and new.is_dir() and not old.exists()
    assert other.let_go(str(new)), "it is to be freed"
    other.free(str(new))
    assert new.is_dir(), "another process holds it"
    assert cache.let_go(str(new))
    cache.free(str(new))
    assert cache.num_bytes(KEY) == 0 and not new.parent.exists()


def test_who_has_found_a_version_may_hold_it_for_a_moment_after_its_removal_began(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    size = folder_bytes(tmp_path)
    cache, other = (DiskCache(tmp_path / "cache", 10 * size) for _ in range(2))
    path = keep(cache, KEY, size)

    def hold_late(seconds: float) -> None:
        assert other.entry(KEY) is None, "nobody finds it any more"
        other.hold(str(path))

    monkeypatch.setattr(disk_cache, "time", SimpleNamespace(sleep=hold_late))
    cache.remove(KEY)
    assert is_whole(path, path.name) and other.let_go(str(path))


def test_what_was_not_removed_is_not_freed_when_it_is_let_go(tmp_path: Path) -> None:
    size = folder_bytes(tmp_path)
    cache = DiskCache(tmp_path / "cache", 10 * size)
    path = keep(cache, KEY, size)
    cache.hold(str(path))
    cache.remove(KEY)
    keep(cache, KEY, size)  # wanted again
    assert not cache.let_go(str(path))
    cache.free(str(path))
    assert cache.entry(KEY) is not None and is_whole(path, path.name)


def test_what_a_dead_process_held_when_it_was_removed_is_freed_by_the_next(tmp_path: Path) -> None:
    size = folder_bytes(tmp_path)
    dead, cache = (DiskCache(tmp_path / "cache", 10 * size) for _ in range(2))
    path = keep(dead, KEY, size)
    dead.hold(str(path))
    cache.remove(KEY)
    del dead  # the system closes its files
    keep(cache, "hub-other", size)
    assert not path.parent.exists()


def test_a_folder_of_no_cache_needs_no_holding(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path / "cache", 100)
    cache.hold(str(tmp_path / "root" / "mine"))
    assert not cache.let_go(str(tmp_path / "root" / "mine")) and not (tmp_path / "cache").exists()


def test_equal_files_that_are_published_again_are_not_evicted_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    size = folder_bytes(tmp_path)
    cache, other = (DiskCache(tmp_path / "cache", 10 * size) for _ in range(2))
    path = keep(cache, KEY, size)

    def whole_and_wanted(folder: Path, version: str) -> bool:
        was_whole = is_whole(folder, version)
        assert was_whole and not other._delete(path)
        return was_whole

    monkeypatch.setattr(disk_cache, "is_whole", whole_and_wanted)
    assert is_whole(keep(cache, KEY, size), path.name)


def test_however_many_adapters_come_and_go_nothing_but_the_lock_stays(tmp_path: Path) -> None:
    size = folder_bytes(tmp_path)
    cache = DiskCache(tmp_path / "cache", 2 * size)
    for i in range(4):
        keep(cache, f"hub-{i}", size, seed=i)
    for i in range(4):
        cache.remove(f"hub-{i}")
    left = {path.relative_to(tmp_path / "cache") for path in (tmp_path / "cache").rglob("*")}
    assert left == {Path("lock"), Path("partial")} and (tmp_path / "cache" / "lock").stat().st_size == 0


def test_an_unreadable_entry_is_none(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path / "cache", 1 << 20)
    keep(cache, KEY, folder_bytes(tmp_path))
    (tmp_path / "cache" / KEY / "entry.json").write_text("{")
    assert cache.entry(KEY) is None and cache.entries() == {}


def test_only_one_holds_a_key_and_others_are_free(tmp_path: Path) -> None:
    caches = [DiskCache(tmp_path / "cache", 100) for _ in range(2)]
    entered = threading.Event()

    def enter() -> None:
        with caches[1].only_one(KEY):
            entered.set()

    thread = threading.Thread(target=enter)
    with caches[0].only_one(KEY):
        thread.start()
        with caches[1].only_one("hub-other"):
            assert not entered.wait(0.2)  # it must not come while the key is held
    thread.join()
    assert entered.is_set()


def test_what_is_published_counts_once(tmp_path: Path) -> None:
    size = folder_bytes(tmp_path)
    cache = DiskCache(tmp_path / "cache", 2 * size)
    with downloaded(cache, size) as (staged, entry), cache.published(KEY, staged, entry) as path:
        assert keep(cache, "hub-other", size, seed=1).exists() and path.exists()


def test_what_is_published_out_of_a_staged_folder_counts_once_too(tmp_path: Path) -> None:
    """As a merge is, which is made beside its parts."""
    size = folder_bytes(tmp_path)
    cache = DiskCache(tmp_path / "cache", 2 * size)
    with cache.only_one(KEY), cache.staging(KEY, size) as staged:
        save_folder(made := staged / "made", rank=4)
        entry = Entry(name=KEY, version=content_hash(made), stamp="s", is_private=False)
        with cache.published(KEY, made, entry) as path:
            assert keep(cache, "hub-other", size, seed=1).exists() and path.exists()


def test_nothing_is_published_while_another_process_counts(tmp_path: Path) -> None:
    size = folder_bytes(tmp_path)
    cache, other = (DiskCache(tmp_path / "cache", 2 * size) for _ in range(2))
    with downloaded(cache, size) as (staged, entry), ThreadPoolExecutor(1) as threads:
        with other.only_one(disk_cache.ROOM):
            publishing = threads.submit(cache._publish, KEY, staged, entry)
            with pytest.raises(TimeoutError):
                publishing.result(0.2)
            assert not cache.has(KEY)
        assert publishing.result(30).exists()


@pytest.mark.parametrize("work", ["free", "grow", "disown"])
def test_files_are_counted_and_deleted_by_one_process_at_a_time(tmp_path: Path, work: str) -> None:
    size = folder_bytes(tmp_path)
    cache, other = (DiskCache(tmp_path / "cache", 2 * size) for _ in range(2))
    removed = keep(cache, KEY, size)
    (removed / disk_cache.REMOVED_FILE).touch()
    entry_file = removed.parent / disk_cache.ENTRY_FILE
    with cache.only_one("hub-a"), cache.staging("hub-a") as staged, ThreadPoolExecutor(1) as threads:
        calls = {"free": (cache.free, str(removed)), "grow": (cache.grow, staged, size), "disown": (cache.disown, KEY)}
        gone = {"free": removed, "grow": staged, "disown": entry_file}[work]
        with other.only_one(disk_cache.ROOM):
            call = threads.submit(*calls[work])
            with pytest.raises(TimeoutError):
                call.result(0.2)  # it must not come while the other counts
            assert gone.exists()
        call.result(30)
        assert not gone.exists()


def test_the_eviction_of_an_older_version_leaves_the_newer_one_to_be_found(tmp_path: Path) -> None:
    size = folder_bytes(tmp_path)
    cache = DiskCache(tmp_path / "cache", 2 * size)
    old, new = keep(cache, KEY, size, seed=0, last_used=1000.0), keep(cache, KEY, size, seed=1, last_used=2000.0)
    keep(cache, "hub-other", size, seed=2)
    entry = cache.entry(KEY)
    assert not old.exists() and entry and entry.version == new.name and is_whole(new, new.name)


def test_equal_content_that_comes_again_counts_as_used_now(tmp_path: Path) -> None:
    size = folder_bytes(tmp_path)
    cache = DiskCache(tmp_path / "cache", 3 * size)
    again, other = keep(cache, KEY, size, last_used=1000.0), keep(cache, "hub-1", size, seed=1, last_used=2000.0)
    keep(cache, KEY, size)
    for number in (2, 3):
        keep(cache, f"hub-{number}", size, seed=number)
    assert again.exists() and not other.exists()


def test_a_file_of_no_version_that_its_source_has_no_more_is_gone_when_equal_content_comes_again(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path / "cache", 1 << 20)
    for has_extra in (True, False):
        with cache.only_one(KEY), cache.staging(KEY) as staged:
            save_folder(staged, rank=4)
            if has_extra:
                (staged / EXTRA_FILES[0]).write_text("{}")
            with cache.published(KEY, staged, Entry(name=KEY, version=content_hash(staged), stamp="s", is_private=False)) as path:
                assert (path / EXTRA_FILES[0]).exists() == has_extra


def test_of_too_many_uses_those_that_changed_last_are_kept_and_all_are_in_the_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tier_uses, "MAX_REMEMBERED", 2)
    uses = TierUses()
    for key in ("a", "b", "a", "c"):
        uses.add(key, TierUse(num_loads=1))
    assert [uses.of(key).num_loads for key in ("a", "b", "c")] == [2, 0, 1] and uses.total.num_loads == 4
