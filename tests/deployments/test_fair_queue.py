import gc
import weakref
from itertools import islice

import pytest

from loray.deployments import fair_queue
from loray.deployments.adapters import Adapter
from loray.deployments.fair_queue import MOST_AHEAD
from tests.deployments.named_queue import NamedQueue


def test_the_adapter_served_least_goes_first_and_the_base_model_is_one_of_them() -> None:
    queue = NamedQueue()
    first = [queue.arrive("b0", "b"), queue.arrive("a0", "a"), queue.arrive("base0")]
    for sequence, num_tokens in zip(first, (30, 20, 10), strict=True):
        queue.start(sequence, num_tokens)
    for name, version in (("b1", "b"), ("a1", "a"), ("base1", "")):
        queue.arrive(name, version)
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
    for sequence in [queue.arrive("b", "b"), queue.arrive("a", "a")]:
        queue.start(sequence, 8)
    assert queue.served(queue.arrive("a1", "a")) == 2 and queue.served(queue.arrive("b1", "b")) == 8
    assert queue.names() == ["a1", "b1"]


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
    assert queue.served(a) == 3 and queue.served(b) == 5 and queue.names() == ["a1", "b1"]


@pytest.mark.parametrize(("max_credit", "served"), [(0, 71), (30, 41), (100, 1)])
def test_an_adapter_that_comes_back_starts_where_it_was_but_with_little_credit(max_credit: float, served: float) -> None:
    queue = NamedQueue(max_credit)
    gone = queue.start(queue.arrive("gone", "a"), 1)
    for name, num_tokens in (("b", 100), ("c", 70)):
        queue.start(queue.arrive(name, name), num_tokens)
    queue.forget(gone)
    assert queue.served(queue.arrive("back", "a")) == served, "b and c began with the 1 of a"
    assert queue.served(queue.arrive("new", "d")) == 71, "the least served that runs"


def test_the_prompt_of_one_that_has_just_come_goes_first_but_not_for_ever() -> None:
    queue = NamedQueue()
    queue.start(queue.arrive("first", "busy"), 100)
    busy, owing = queue.start(queue.arrive("busy", "busy")), queue.start(queue.arrive("owing", "owing"), 500)
    queue.forget(owing)
    back, new, second = queue.arrive("back", "owing"), queue.arrive("new", "new"), queue.arrive("second", "busy")
    assert sorted([second, back, busy, new], key=queue.turn_of_prompt) == [new, second, busy, back]
    queue.start(new)
    for new.num_computed, is_first in ((MOST_AHEAD - 1, True), (MOST_AHEAD, False)):
        assert (queue.turn_of_prompt(new) < queue.turn_of_prompt(busy)) == is_first
    new.num_computed = 0
    queue.charge(new, 1)
    queue.put_back(new)
    assert queue.turn_of_prompt(new) > queue.turn_of_prompt(busy), "it has had its turn"


def test_ever_new_ones_go_ahead_until_they_have_had_much_more_than_others() -> None:
    queue = NamedQueue()
    first = queue.start(queue.arrive("first", "first"))
    busy = queue.start(queue.arrive("busy", "busy"))
    busy.num_computed = busy.num_prompt
    queue.charge(busy, 0)
    second = queue.arrive("second", "busy")

    def is_ahead(name: str) -> bool:
        return queue.turn_of_prompt(queue.arrive(name, name)) < (True, 0)

    for number in range(4):
        assert is_ahead(f"new{number}")
        queue.charge(first, MOST_AHEAD // 4)
    assert not is_ahead("last"), "each goes by what it was served"
    queue.charge(first, MOST_AHEAD // 2)
    queue.charge(busy, MOST_AHEAD // 2 - 1)
    assert not is_ahead("later"), "for as many tokens, whoever has them"
    queue.charge(busy, 1)
    assert is_ahead("anew") and not queue.turn_of_prompt(second) < (True, 0)
    queue.charge(busy, MOST_AHEAD)
    assert is_ahead("yet another"), "an answer is not ahead of anybody"


def test_prompts_that_keep_nobody_waiting_are_not_ahead() -> None:
    queue = NamedQueue()
    queue.start(queue.arrive("first", "first"), MOST_AHEAD)
    queue.start(queue.arrive("busy"), 0)
    assert not queue.turn_of_prompt(queue.arrive("new", "new"))[0]


@pytest.mark.parametrize(("max_credit", "served"), [(10, 50), (100, 90)])
@pytest.mark.parametrize("page_ids", [[], [1]], ids=["outside the pool", "in the pool"])
def test_one_that_comes_starts_with_the_least_served_that_runs_but_little_behind_those_that_wait(
    page_ids: list[int], max_credit: float, served: float
) -> None:
    queue = NamedQueue(max_credit)
    queue.adapter("behind", page_ids)
    ahead = queue.start(queue.arrive("ahead"), 40)
    queue.arrive("behind", "behind")
    queue.charge(ahead, 50)
    assert queue.served(queue.arrive("new", "new")) == served, "the one that runs has 90, the one that waits 40"


def test_one_whose_requests_never_wait_earns_little_credit() -> None:
    queue = NamedQueue(max_credit=10)
    little = queue.start(queue.arrive("first", "little"), 1)
    queue.start(queue.arrive("busy", "busy"), 100)
    assert queue.served(little) == 1
    queue.arrive("second", "little")
    assert queue.served(little) == 91, "the other began with 1, started last, and has 101"
    queue.charge(queue.start(queue.arrive("third", "busy")), 50)
    queue.arrive("fourth", "little")
    assert queue.served(little) == 91, "what waits keeps its credit"


def test_credit_is_counted_from_the_least_served_that_waits() -> None:
    queue = NamedQueue(max_credit=10)
    little = queue.start(queue.arrive("first", "little"), 0)
    queue.start(queue.arrive("busy", "busy"), 100)
    queue.put_back(queue.start(queue.arrive("waits", "b"), 40))
    queue.arrive("second", "little")
    assert queue.served(little) == 30


def test_one_that_waits_for_its_adapter_to_load_is_not_shown_and_then_has_no_credit() -> None:
    queue = NamedQueue()
    slow = queue.adapter("slow", page_ids=[], is_ready=False)
    queue.arrive("slow", "slow")
    busy = queue.start(queue.arrive("busy", "b"), 100)
    assert queue.names() == [] and queue.next_adapters(4) == [slow]
    slow.is_ready = True
    queue.wake_loaded()
    assert queue.names() == ["slow"] and queue.served(busy) == 100
    assert queue.served(next(iter(queue))) == 100


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


def test_a_debt_is_forgotten_when_the_others_are_as_far_ahead_as_credit_lasts_or_nobody_is_left() -> None:
    queue = NamedQueue(max_credit=50)
    running = queue.start(queue.arrive("b0", "b"), 10)
    queue.forget(queue.start(queue.arrive("a0", "a"), 100))
    queue.charge(running, 149)
    queue.forget(queue.start(queue.arrive("c0", "c")))
    assert "a" in queue._debts
    queue.charge(running, 1)
    queue.forget(queue.start(queue.arrive("c1", "c")))
    assert "a" not in queue._debts
    queue.forget(running)
    assert not queue._debts and not queue._accounts


def test_debts_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fair_queue, "MAX_DEBTS", 50)
    queue = NamedQueue()
    queue.start(queue.arrive("b0", "b"), 1)
    for number in range(500):
        queue.forget(queue.start(queue.arrive(f"r{number}", f"a{number}"), 100))
    assert len(queue._debts) <= 50
