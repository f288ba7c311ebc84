import pytest

from loray.deployments.adapters import Adapter, AdapterTable
from loray.deployments.fair_shares import Leaving, num_slots, victim_of_arrival, victim_of_growth
from tests.deployments.named_queue import NamedQueue

NUM_PAGES = 16


def table_with(num_available: int) -> AdapterTable:
    table = AdapterTable(NUM_PAGES)
    table.place(table.acquire(Adapter("other", "other", "other", NUM_PAGES - num_available)))
    return table


def test_a_place_is_taken_from_the_adapter_that_holds_most_for_its_weight_unless_it_is_far_behind() -> None:
    queue = NamedQueue(heavy=8.0)
    running = [queue.arrive(f"{name}{i}", name) for name in ("old", "heavy", "light") for i in range(4)]
    taker = queue.arrive("taker", "taker")
    for sequence in running:
        queue.start(sequence)
    queue.charge(running[4], 1000)  # of heavy
    assert victim_of_arrival(taker, 1, num_slots, 0, running, queue) is running[-1], "the youngest of light"
    queue._account_of(taker).served = queue.served(running[-1]) + 10
    assert victim_of_arrival(taker, 1, num_slots, 9, running, queue) is None
    assert victim_of_arrival(taker, 1, num_slots, 10, running, queue) is running[-1]
    assert victim_of_arrival(taker, 3, num_slots, 10, running, queue) is None, "it would hold more than half as much"


def test_as_many_adapters_leave_the_pool_as_it_takes_and_only_those_that_are_ahead() -> None:
    queue = NamedQueue()
    running = [queue.arrive(name, name, num_prompt=2) for name in ("a", "b", "c", "d")]
    starved = queue.arrive("starved", "starved")
    for sequence, num_tokens in zip(running, (40, 30, 20, 10), strict=True):
        queue.start(sequence, num_tokens)
    assert starved.adapter
    for num_pages, names in ((1, "a"), (2, "ab"), (4, "abc")):
        starved.adapter.num_pages = num_pages
        leaving = Leaving(15, table_with(0), [], running, queue)
        assert leaving.make_room(starved, num_missing_blocks=0) and leaving.adapters == {queue.adapters[name] for name in names}
    queue.adapters["a"].num_pages = 4
    leaving = Leaving(15, table_with(0), [], running, queue)
    assert leaving.make_room(starved, num_missing_blocks=0) and leaving.adapters == {queue.adapters["a"]}, "its four pages are enough"
    starved.adapter.num_pages = 1
    leaving = Leaving(15, table_with(0), [queue.adapters["c"]], running, queue)
    assert leaving.make_room(starved, num_missing_blocks=0) and leaving.adapters == {queue.adapters["c"]}, "it is on its way out already"


def test_each_that_waits_for_pages_has_others_leave_until_none_is_ahead_of_it() -> None:
    queue = NamedQueue()
    running = [queue.arrive(name, name, num_prompt=2) for name in ("a", "b", "c", "d")]
    first, second, third, last = (queue.arrive(name, name) for name in ("first", "second", "third", "last"))
    for sequence, num_tokens in zip(running, (40, 30, 20, 10), strict=True):
        queue.start(sequence, num_tokens)
    queue.charge(third, 10)
    leaving = Leaving(15, table_with(0), [], running, queue)
    assert [leaving.make_room(sequence, num_missing_blocks=0) for sequence in (first, second, third, last)] == [True, True, False, True]
    assert leaving.adapters == {queue.adapters[name] for name in "abc"}, "c is less than a lead ahead of the third"


def test_who_leaves_stops_at_once_when_as_many_pages_stand_empty_as_it_has_or_when_it_has_most() -> None:
    queue = NamedQueue()
    *running, big, small = (queue.arrive(name, name) for name in ("a", "b", "c", "big", "small"))
    for sequence in running:
        queue.start(sequence, 40)
    a, b, c = (queue.adapters[name] for name in "abc")
    assert big.adapter
    for num_available, num_wanted, is_hurried in ((2, 4, True), (1, 4, False), (3, 4, True), (0, 1, False), (4, 8, False)):
        big.adapter.num_pages = num_wanted
        leaving = Leaving(15, table_with(num_available), [], running, queue)
        assert leaving.make_room(big, num_missing_blocks=0) and leaving.hurried == (leaving.adapters if is_hurried else set()), (
            num_available,
            num_wanted,
        )
    leaving = Leaving(15, table_with(2), [], running, queue)
    big.adapter.num_pages = 4
    assert leaving.make_room(big, num_missing_blocks=0) and leaving.make_room(small, num_missing_blocks=0)
    assert leaving.adapters == {a, b, c} and len(leaving.hurried) == 2, "the pages are kept for the first alone"
    for num_pages, is_hurried in ((NUM_PAGES // 2, False), (NUM_PAGES // 2 + 1, True)):
        a.num_pages = num_pages
        leaving = Leaving(15, table_with(0), [], running[:1], queue)
        assert leaving.make_room(small, num_missing_blocks=0) and leaving.hurried == ({a} if is_hurried else set())


@pytest.mark.parametrize("hindrance", ["none", "owed", "not in host memory", "a pin", "too few blocks", "a newer version"])
def test_who_leaves_stops_at_once_only_if_it_can_come_back_and_loses_nothing(hindrance: str) -> None:
    queue = NamedQueue()
    running, starved = queue.arrive("a", "a"), queue.arrive("starved", "starved")
    queue.start(running, 40)
    assert running.adapter
    running.adapter.num_pages, running.num_owed = NUM_PAGES // 2 + 1, int(hindrance == "owed")
    running.block_ids = [1, 2]
    running.adapter.is_ready = hindrance != "not in host memory"
    table = table_with(0)
    if hindrance == "a pin":
        table.pin(Adapter("pinned", "pinned", "pinned", NUM_PAGES // 2))
    if hindrance == "a newer version":
        queue.arrive("a2", "a.2")
    leaving = Leaving(15, table, [], [running], queue)
    assert leaving.make_room(starved, num_missing_blocks=3 if hindrance == "too few blocks" else 2) and leaving.adapters == {
        running.adapter
    }
    assert bool(leaving.hurried) == (hindrance == "none")


def test_the_oldest_of_all_never_gives_its_blocks() -> None:
    queue = NamedQueue()
    running = [queue.start(queue.arrive(f"a{i}", "a")) for i in range(2)]
    for sequence in running:
        sequence.block_ids = [1, 2, 3]
    assert victim_of_growth(running, queue) is running[1]
    assert victim_of_growth(running[:1], queue) is None
