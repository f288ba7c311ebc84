import gc
import weakref
from itertools import islice

from loray.deployments.adapters import Adapter
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
    a, b = queue.start(queue.arrive("a", "a")), queue.start(queue.arrive("b", "b"))
    queue.arrive("b1", "b")
    queue.arrive("a1", "a")
    for sequence in (a, b):
        queue.charge(sequence, 500)
    clock = queue._clock.now
    queue.charge(a, 10)
    assert queue.names() == ["b1", "a1"] and queue._clock.now == clock + 5
    queue.refund(a, 10)
    assert queue._clock.now == clock
    queue.refund(a, 2)
    assert queue.served(b) - queue.served(a) == 2 and queue.names() == ["a1", "b1"]


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
