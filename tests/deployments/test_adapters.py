import pytest

from loray.deployments.adapters import Adapter, AdapterTable


def adapter(name: str, num_pages: int = 1) -> Adapter:
    return Adapter(name, name, name, num_pages)


def test_two_requests_for_one_version_share_its_pages() -> None:
    table = AdapterTable(4)
    first, second = table.acquire(adapter("a", 2)), table.acquire(adapter("a", 2))
    assert first is second and table.num_references == 2
    assert table.place(first).page_ids == [0, 1] == second.page_ids


def test_an_adapter_in_use_is_never_evicted() -> None:
    table = AdapterTable(2)
    used = table.acquire(adapter("used", 2))
    table.place(used)
    other = table.acquire(adapter("other"))
    assert not table.can_place(other)
    table.release(used)
    assert table.can_place(other)


def test_the_least_recently_used_adapter_is_evicted_first() -> None:
    table = AdapterTable(2)
    for name in ("a", "b"):
        used = table.acquire(adapter(name))
        table.place(used)
        table.release(used)
    table.release(table.acquire(adapter("a")))
    table.place(table.acquire(adapter("c")))
    assert table.acquire(adapter("a")).page_ids and not table.acquire(adapter("b")).page_ids


def test_pages_of_one_adapter_are_consecutive_where_possible() -> None:
    table = AdapterTable(6)
    placed = {name: table.acquire(adapter(name, pages)) for name, pages in (("a", 1), ("b", 1), ("c", 4))}
    for each in placed.values():
        table.place(each)
    table.release(placed["a"])
    table.release(placed["c"])
    big = table.acquire(adapter("big", 3))
    table.place(big)
    assert big.page_ids in ([2, 3, 4], [3, 4, 5])


def test_scattered_pages_serve_as_well() -> None:
    table = AdapterTable(3)
    placed = [table.acquire(adapter(name)) for name in "abc"]
    for each in placed:
        table.place(each)
    table.release(placed[0])
    table.release(placed[2])
    scattered = table.acquire(adapter("d", 2))
    assert sorted(table.place(scattered).page_ids) == [0, 2]


def test_a_failed_load_leaves_no_trace() -> None:
    table = AdapterTable(2)
    bad = table.acquire(adapter("bad", 2))
    table.place(bad)
    table.discard(bad)
    table.release(bad)
    assert table.num_used_pages == table.num_references == table.num_resident == 0


def test_a_load_that_fails_after_its_last_user_left_leaves_no_trace() -> None:
    table = AdapterTable(2)
    bad = table.acquire(adapter("bad", 2))
    table.place(bad)
    table.release(bad)
    table.discard(bad)
    table.discard(bad)
    assert table.num_used_pages == table.num_references == table.num_resident == 0
    next_one = table.acquire(adapter("next", 2))
    assert table.can_place(next_one) and len(table.place(next_one).page_ids) == 2
    assert not table.can_place(table.acquire(adapter("third"))), "pages are not counted twice"


def test_releasing_too_often_is_a_broken_invariant() -> None:
    table = AdapterTable(1)
    used = table.acquire(adapter("a"))
    table.release(used)
    with pytest.raises(AssertionError):
        table.release(used)


def test_files_that_were_touched_count_from_the_next_load_on() -> None:
    table = AdapterTable(1)
    old = table.acquire(Adapter("a", "v", "here", 1, signature="1"))
    table.place(old)
    assert table.acquire(Adapter("a", "v", "there", 1, signature="2")) is old and old.signature == "1", "it is in the pool as it was"
    table.discard(old)
    assert table.acquire(Adapter("a", "v", "there", 1, signature="2")) is old and (old.path, old.signature) == ("there", "2")
    old.is_in_host = True
    assert table.known(Adapter("a", "v", "there", 1, signature="3")).signature == "2"


def test_a_pinned_adapter_is_evicted_only_when_it_is_unpinned() -> None:
    table = AdapterTable(2)
    pinned = table.pin(table.acquire(adapter("pinned", 2)))
    table.place(pinned)
    table.release(pinned)
    other = table.acquire(adapter("other"))
    assert not table.can_place(other) and table.num_pinned_pages == 2
    table.unpin(pinned)
    assert table.num_pinned_pages == 0 and table.place(other).page_ids == [0] and not pinned.page_ids


def test_pages_that_were_freed_are_told_once() -> None:
    table = AdapterTable(2)
    used = table.acquire(adapter("used", 2))
    table.place(used)
    table.release(used)
    table.place(table.acquire(adapter("next")))
    assert (table.take_freed_pages(), table.take_freed_pages()) == ([0, 1], [])
    assert (table.num_evictions, used.pool_use.num_evictions, table.num_resident) == (1, 1, 1)
