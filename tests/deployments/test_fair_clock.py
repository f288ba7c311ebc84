"""Where an adapter begins, new or back, and what it was owed."""

import pytest

from loray.deployments import fair_queue
from loray.deployments.fair_clock import MAX_HEAD_START, MIN_HEAD_START
from tests.deployments.named_queue import NamedQueue


@pytest.mark.parametrize(("num_prompt", "head_start"), [(1, MIN_HEAD_START), (300, 300), (5000, MAX_HEAD_START)])
@pytest.mark.parametrize("page_ids", [[], [1]], ids=["outside the pool", "in the pool"])
def test_one_that_comes_starts_with_those_that_wait_less_its_prompt(page_ids: list[int], num_prompt: int, head_start: int) -> None:
    queue = NamedQueue(light=0.5, heavy=2.0)
    queue.adapter("behind", page_ids)
    first = queue.start(queue.arrive("first", "behind"))
    waits = queue.arrive("second", "behind")
    queue.compute(first, 4000)
    assert queue.served(waits) - queue.served(queue.arrive("new", "new", num_prompt)) == head_start
    assert queue.served(waits) - queue.served(queue.arrive("new", "heavy", num_prompt)) == head_start / 2
    assert queue.served(waits) - queue.served(queue.arrive("new", "light", num_prompt)) < head_start


def test_one_whose_requests_never_wait_earns_no_credit() -> None:
    queue = NamedQueue()
    little = queue.start(queue.arrive("first", "little"), 1)
    busy = queue.start(queue.arrive("busy", "busy"), 1000)
    assert queue.served(little) < 1
    queue.arrive("second", "little")
    assert queue.served(busy) - queue.served(little) == MIN_HEAD_START, "the other started last"
    queue.charge(queue.start(queue.arrive("third", "busy")), 500)
    queue.arrive("fourth", "little")
    assert queue.served(busy) - queue.served(little) == MIN_HEAD_START + 500, "what waits keeps its credit"


def test_one_that_comes_back_starts_where_it_was_if_that_is_more() -> None:
    queue = NamedQueue()
    other = queue.start(queue.arrive("other", "b"), 1000)
    gone = queue.start(queue.arrive("gone", "a"), 3000)
    before = queue.served(gone)
    queue.forget(gone)
    back = queue.arrive("back", "a")
    assert queue.served(back) == before
    queue.forget(back)
    queue.arrive("next", "b")
    queue.compute(other, 9000)
    assert queue.served(queue.arrive("again", "a")) == queue.served(other) - MIN_HEAD_START


def test_what_one_was_behind_when_its_turn_came_is_not_lost_by_a_moment_without_requests() -> None:
    """As of an adapter that needs the whole pool, for which it waits long, and all of whose answers end together."""
    queue = NamedQueue()
    other = queue.start(queue.arrive("other", "b"))
    queue.arrive("next", "b")
    large = queue.arrive("large", "a")
    queue.compute(other, 2000)
    behind = queue._clock.now - queue.served(large) - MIN_HEAD_START
    queue.forget(queue.start(large, 100))
    assert queue.served(queue.arrive("again", "a")) == queue.served(other) - behind < queue.served(other) - MAX_HEAD_START


def test_ever_new_ones_begin_ahead_of_one_that_got_less_than_its_share() -> None:
    """Each is served its prompt before the one that always waits; then it is its turn."""
    queue = NamedQueue()
    first = queue.start(queue.arrive("first", "busy"))
    queue.arrive("busy", "busy")
    queue.compute(first, 1000)
    for number in range(3):
        new = queue.arrive("new", f"new{number}", 100)
        assert queue.names() == (["new", "busy"] if number < 2 else ["busy", "new"]), "of two prompts one was its share"
        queue.forget(queue.start(new, 100))


def test_what_one_that_is_behind_is_served_does_not_put_it_further_behind() -> None:
    queue = NamedQueue()
    busy = queue.start(queue.arrive("first", "busy"))
    queue.arrive("busy", "busy")
    queue.compute(busy, 1000)
    new = queue.start(queue.arrive("new", "new", 500))
    clock = queue._clock.now
    assert clock == queue.served(busy)
    queue.compute(new, 400)
    assert queue._clock.now == clock + 200, "the half of each"
    queue.compute(busy, 200)
    assert queue._clock.now == clock + 200 == queue.served(busy)
    queue.compute(busy, 100)
    assert queue._clock.now == clock + 250


def test_one_that_decodes_and_has_nothing_waiting_is_owed_nothing() -> None:
    queue = NamedQueue()
    stream, prompt = queue.start(queue.arrive("stream", "a")), queue.start(queue.arrive("prompt", "b", 10))
    busy = queue.start(queue.arrive("busy", "c"))
    queue.arrive("next", "c")
    queue.compute(busy, 1000)
    stream.num_computed = 1
    for sequence in (prompt, stream):
        queue.charge(sequence, 1)
    assert queue.served(stream) == queue._clock.now - MIN_HEAD_START and queue.served(prompt) == 1 - MIN_HEAD_START


def test_the_clock_goes_by_those_that_could_compute_alone() -> None:
    queue = NamedQueue(heavy=3.0)
    slow = queue.adapter("slow", page_ids=[], is_ready=False)
    queue.arrive("slow", "slow")
    busy = queue.start(queue.arrive("busy", "busy"))
    heavy = queue.arrive("heavy", "heavy")
    assert queue.names() == ["heavy"]
    queue.compute(busy, 40)
    assert queue._clock.now == pytest.approx(10)
    slow.is_ready = True
    queue.wake_loaded()
    queue.charge(busy, 20)
    assert queue._clock.now == pytest.approx(14)
    queue.forget(heavy)
    queue.charge(busy, 4)
    assert queue._clock.now == pytest.approx(16)


def test_one_that_waits_for_its_adapter_to_load_is_not_shown_and_then_has_no_credit() -> None:
    queue = NamedQueue()
    slow = queue.adapter("slow", page_ids=[], is_ready=False)
    queue.arrive("slow", "slow")
    assert queue.names() == []
    busy = queue.start(queue.arrive("busy", "b"))
    next_busy = queue.arrive("next", "b")
    queue.compute(busy, 200)
    queue.take(next_busy)
    assert queue.names() == [] and queue.next_adapters(4) == [slow]
    slow.is_ready = True
    queue.wake_loaded()
    assert queue.names() == ["slow"] and queue.served(busy) - queue.served(next(iter(queue))) == MIN_HEAD_START


def test_who_asks_for_one_answer_after_another_pays_for_those_before() -> None:
    queue = NamedQueue()
    running = queue.start(queue.arrive("b0", "b"), 10)
    queue.forget(queue.start(queue.arrive("a0", "a"), 100))
    queue.arrive("b1", "b")
    queue.arrive("a1", "a")
    assert queue.names() == ["b1", "a1"]
    queue.charge(running, 50)
    assert queue.names() == ["b1", "a1"]
    queue.charge(running, 60)
    assert queue.names() == ["a1", "b1"]


def test_what_one_was_served_is_forgotten_when_it_would_begin_like_a_new_one() -> None:
    queue = NamedQueue()
    busy = queue.start(queue.arrive("b0", "b"))
    queue.arrive("b1", "b")
    gone = queue.start(queue.arrive("a0", "a"), 2000)
    before = queue.served(gone)
    queue.forget(gone)
    for is_kept in (True, False):
        queue.compute(busy, int(before + (0 if is_kept else MAX_HEAD_START + 2) - queue.served(busy)))
        queue.forget(queue.start(queue.arrive("c", "c")))
        assert ("a" in queue._closed) == is_kept


def test_what_adapters_without_requests_were_served_is_bounded_and_forgotten_with_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fair_queue, "MAX_CLOSED", 50)
    queue = NamedQueue()
    running = queue.start(queue.arrive("b0", "b"), 1)
    for number in range(500):
        queue.forget(queue.start(queue.arrive(f"r{number}", f"a{number}"), 100))
    assert len(queue._closed) <= 50
    queue.forget(running)
    assert not queue._closed and not queue._accounts


def test_however_long_one_has_waited_its_credit_is_bounded() -> None:
    """Many small requests, each of which waits long, and then a flood."""
    queue = NamedQueue()
    busy = queue.start(queue.arrive("b0", "b"))
    queue.arrive("b1", "b")
    for number in range(10):
        rare = queue.arrive(f"rare{number}", "rare")
        queue.compute(busy, 5000)
        queue.forget(queue.start(rare, 8))
    assert queue._clock.now - queue.served(queue.arrive("flood", "rare")) <= fair_queue.MAX_CREDIT


def test_one_that_gives_up_while_its_adapter_loads_has_no_credit_when_it_comes_again() -> None:
    queue = NamedQueue()
    slow = queue.adapter("slow", page_ids=[], is_ready=False)
    waiting = queue.arrive("slow", "slow")
    busy = queue.start(queue.arrive("b0", "b"))
    queue.arrive("b1", "b")
    assert queue.names() == ["b1"]
    queue.compute(busy, 5000)
    queue.forget(waiting)
    slow.is_ready = True
    assert queue.served(queue.arrive("again", "slow")) == queue._clock.now - MIN_HEAD_START


def test_a_version_that_loads_earns_no_credit_for_another() -> None:
    queue = NamedQueue()
    queue.adapter("a.2", page_ids=[], is_ready=False)
    queue.arrive("new", "a.2")
    busy = queue.start(queue.arrive("b0", "b"))
    queue.arrive("b1", "b")
    assert queue.names() == ["b1"]
    queue.compute(busy, 5000)
    assert queue.served(queue.arrive("old", "a.1")) == queue._clock.now - MIN_HEAD_START


def test_a_version_that_is_set_apart_takes_its_prompts_along() -> None:
    queue = NamedQueue()
    sequence, sibling = queue.start(queue.arrive("first", "a.1", 100)), queue.start(queue.arrive("second", "a.2", 100))
    queue.set_apart(queue.adapters["a.1"], True, num_running=1)
    assert queue._account_of(sequence).prompts == {sequence} and queue._account_of(sibling).prompts == {sibling}


def test_streams_that_take_less_than_their_share_do_not_count() -> None:
    queue = NamedQueue()
    streams = [queue.start(queue.arrive(f"s{number}", f"s{number // 2}")) for number in range(18)]
    busy = queue.start(queue.arrive("b0", "b"))
    queue.arrive("b1", "b")
    for stream in streams:
        stream.num_computed = 1
    for _ in range(2):
        queue.compute(busy, 5000)
        for stream in streams:
            queue.charge(stream, 1)
    clock = queue._clock.now
    queue.compute(busy, 5000)
    assert queue._clock.now > clock + 4000
