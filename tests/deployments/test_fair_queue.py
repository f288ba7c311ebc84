import gc
import weakref
from itertools import islice

import pytest

from loray.deployments import fair_queue
from loray.deployments.adapters import Adapter
from loray.deployments.fair_clock import MAX_HEAD_START, MIN_HEAD_START
from tests.deployments.named_queue import NamedQueue


def test_the_adapter_served_least_goes_first_and_the_base_model_is_one_of_them() -> None:
    queue = NamedQueue()
    first = [queue.start(queue.arrive(f"{name}0", version)) for name, version in (("b", "b"), ("a", "a"), ("base", ""))]
    for name, version in (("b1", "b"), ("a1", "a"), ("base1", "")):
        queue.arrive(name, version)
    for sequence, num_tokens in zip(first, (30, 20, 10), strict=True):
        queue.compute(sequence, num_tokens)
    assert queue.names() == ["base1", "a1", "b1"]


def test_of_one_adapter_the_oldest_goes_first_and_one_that_ran_already_before_it() -> None:
    queue = NamedQueue()
    first = queue.start(queue.arrive("first", "a"))
    queue.arrive("second", "a")
    assert queue.names() == ["second"]
    queue.put_back(first)
    first.slot = None
    assert queue.names() == ["first"] and len(queue) == 2


def test_whoever_takes_one_is_shown_the_next_in_the_order_of_what_was_charged_meanwhile() -> None:
    queue = NamedQueue()
    for i in range(3):
        queue.arrive(f"a{i}", "a")
        queue.arrive(f"b{i}", "b")
    order = []
    for sequence in queue:
        order.append(sequence.request.request_id)
        queue.start(sequence, 10 if sequence.adapter is queue.adapters["a"] else 4)
    assert order == ["a0", "b0", "b1", "b2", "a1", "a2"]
    assert len(queue) == 0 and queue.names() == []


def test_an_iteration_that_is_broken_off_loses_nobody() -> None:
    queue = NamedQueue()
    for name in ("a", "b", "c"):
        queue.arrive(name, name)
    for count in (1, 2, 3, 0, 3):
        assert [sequence.request.request_id for sequence in islice(queue, count)] == ["a", "b", "c"][:count]
    assert queue.names() == ["a", "b", "c"]


def test_a_weight_divides_what_is_charged() -> None:
    queue = NamedQueue(a=4.0)
    for name, served in (("b", 8), ("a", 2)):
        sequence = queue.arrive(name, name)
        before = queue.served(sequence)
        queue.start(sequence, 8)
        assert queue.served(sequence) - before == served


def test_what_is_charged_can_be_taken_back() -> None:
    queue = NamedQueue()
    a, b = queue.arrive("a", "a"), queue.arrive("b", "b")
    for sequence in (a, b):
        queue.start(sequence, 5)
    queue.arrive("b1", "b")
    queue.arrive("a1", "a")
    queue.charge(a, 10)
    assert queue.names() == ["b1", "a1"]
    queue.refund(a, 12)
    assert queue.served(b) - queue.served(a) == 2 and queue.names() == ["a1", "b1"]


@pytest.mark.parametrize(("num_prompt", "head_start"), [(1, MIN_HEAD_START), (300, 300), (5000, MAX_HEAD_START)])
@pytest.mark.parametrize("page_ids", [[], [1]], ids=["outside the pool", "in the pool"])
def test_one_that_comes_starts_with_those_that_wait_less_its_prompt(page_ids: list[int], num_prompt: int, head_start: int) -> None:
    queue = NamedQueue(light=0.5)
    queue.adapter("behind", page_ids)
    first = queue.start(queue.arrive("first", "behind"))
    waits = queue.arrive("second", "behind")
    queue.compute(first, 4000)
    assert queue.served(waits) - queue.served(queue.arrive("new", "new", num_prompt)) == head_start
    assert queue.served(waits) - queue.served(queue.arrive("new", "light", num_prompt)) == 2 * head_start


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
    assert queue._clock.now == 10
    slow.is_ready = True
    queue.wake_loaded()
    queue.charge(busy, 20)
    assert queue._clock.now == 14
    queue.forget(heavy)
    queue.charge(busy, 4)
    assert queue._clock.now == 16


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


def test_a_version_that_is_not_ready_holds_up_no_other_version() -> None:
    queue = NamedQueue()
    queue.adapter("a.2", page_ids=[], is_ready=False)
    queue.arrive("new", "a.2")
    queue.arrive("old", "a.1")
    assert queue.names() == ["old"] and queue.num_waiting_of("a") == 2


def test_those_outside_the_pool_can_be_skipped_until_the_next_iteration() -> None:
    queue = NamedQueue()
    for name in ("x", "y"):
        queue.adapter(name, page_ids=[])
    for name in ("x", "y", "inside"):
        queue.arrive(name, name)
    queue.arrive("base")
    shown = []
    for sequence in queue:
        shown.append(sequence.request.request_id)
        if shown == ["x"]:
            queue.skip_outside()
    assert shown == ["x", "inside", "base"]
    assert queue.names() == ["x", "y", "inside", "base"]


def test_adapters_that_enter_or_leave_the_pool_are_found_where_they_are() -> None:
    queue = NamedQueue()
    starved, a, b = queue.adapter("starved", page_ids=[]), queue.adapter("a", page_ids=[]), queue.adapter("b")
    for name in ("a0", "a1", "b0"):
        queue.arrive(name, name[0])
    assert queue.next_adapters(4) == [a] and queue.next_adapters(0) == []
    for sequence in queue:
        a.page_ids = [0]
        queue.start(sequence, 7)
        break
    other_b = queue.start(queue.arrive("b1", "b.2"))
    queue.arrive("starved", "starved")
    b.page_ids = []
    queue.charge(other_b, 5)
    shown = []
    for sequence in queue:
        shown.append(sequence.request.request_id)
        if sequence.adapter is starved:
            queue.skip_outside()
    assert shown == ["starved", "a1"] and queue.next_adapters(4) == [starved, b]


def test_one_that_ends_while_its_adapter_loads_is_forgotten() -> None:
    queue = NamedQueue()
    slow = queue.adapter("slow", page_ids=[], is_ready=False)
    sequence = queue.arrive("slow", "slow")
    assert queue.names() == [] and queue.next_adapters(4) == [slow]
    queue.forget(sequence)
    slow.is_ready = True
    queue.wake_loaded()
    assert queue.names() == [] and queue.next_adapters(4) == []


def test_waiting_sequences_are_counted_in_all_and_by_adapter() -> None:
    queue = NamedQueue()
    a0, a1, base = queue.arrive("a0", "a"), queue.arrive("a1", "a.2"), queue.arrive("base")
    assert (len(queue), queue.num_waiting_of("a"), queue.num_waiting_of(""), queue.num_waiting_of("other")) == (3, 2, 1, 0)
    queue.start(a0)
    queue.forget(base)
    assert (len(queue), queue.num_waiting_of("a"), queue.num_waiting_of("")) == (1, 1, 0)
    queue.forget(a1)
    queue.forget(a0)
    assert len(queue) == 0 and queue.num_waiting_of("a") == 0


def test_adapters_without_requests_are_forgotten() -> None:
    queue = NamedQueue()
    queue.start(queue.arrive("running", "r"))
    queue.arrive("waiting", "r")
    adapters: weakref.WeakSet[Adapter] = weakref.WeakSet()
    for i in range(10_000):
        sequence = queue.arrive(str(i), f"a{i}")
        adapters.add(queue.adapters.pop(f"a{i}"))
        queue.forget(sequence)
    del sequence
    gc.collect()
    assert len(adapters) < 200 and queue.names() == ["waiting"]


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
