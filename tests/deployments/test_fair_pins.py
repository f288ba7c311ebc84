"""Pinned versions have accounts of their own, from one step to the next and with all that waits or runs."""

import random
from collections.abc import Callable

import pytest

from loray.deployments.fair_clock import MIN_HEAD_START
from loray.deployments.sequence import Sequence
from tests.deployments.named_queue import NamedQueue
from tests.deployments.simulated_rank import greedy
from tests.deployments.stepped_scheduler import Server
from tests.deployments.traffic import output_of

pytestmark = pytest.mark.slow

VERSIONS = ("a1", "a2", "a3", "b1", "b2", "c1", "")


@pytest.mark.parametrize("num_others", [2, 3, 5])
def test_a_version_beside_a_busy_pinned_one_is_served_again_and_again(num_others: int) -> None:
    server, num_answers, longest = Server(num_blocks=4000, num_pages=3, max_batch_tokens=32, max_running=8), 0, 0
    asked = {version: [server.add_version(version[0], version, [1], 10)] for version in ("a.pinned", *"bcdef"[:num_others])}
    pinned = asked["a.pinned"][0].adapter
    assert pinned
    server.scheduler.adapters.pin(pinned)
    waited, cold = 0, server.add_version("a", "a.cold", [1], 5)
    for _ in range(3000):
        for version, sequences in asked.items():
            sequences[:] = [sequence for sequence in sequences if not sequence.is_finished]
            while len(sequences) < 4:
                sequences.append(server.add_version(version[0], version, [server.arrivals], 10))
        waited += 1
        if cold.is_finished:
            assert output_of(cold) == greedy("a.cold", [1], 5)
            num_answers, longest, waited = num_answers + 1, max(longest, waited), 0
            cold = server.add_version("a", "a.cold", [1], 5)
        server.turn()
    assert num_answers > 20 and max(longest, waited) < 250, (num_answers, longest, waited)


@pytest.mark.parametrize("seed", range(6))
def test_whatever_is_pinned_or_unpinned_meanwhile_every_answer_comes(seed: int) -> None:
    rng = random.Random(seed)
    server = Server(num_blocks=rng.choice((60, 4000)), num_pages=4, max_batch_tokens=32, max_running=rng.choice((2, 8)))
    table, asked = server.scheduler.adapters, []
    for number in range(400):
        version = rng.choice(VERSIONS)
        sequence = server.add_version(version[0], version, [number], rng.randint(1, 20)) if version else server.add([number], 5)
        asked.append((version, number, sequence))
        adapter = rng.choice(asked)[2].adapter
        if adapter and adapter.references and rng.random() < 0.3:
            if adapter.is_pinned:
                table.unpin(adapter)
            elif table.could_pin(adapter):
                table.pin(adapter)
        for _ in range(rng.randint(0, 5)):
            server.turn()
    server.run()
    for version, number, sequence in asked:
        assert output_of(sequence) == greedy(version, [number], sequence.request.max_new_tokens)
    assert len(server.scheduler.waiting) == 0 and not server.scheduler.waiting._accounts


def test_what_waits_goes_along_with_what_it_was_served() -> None:
    queue = NamedQueue()
    queue.start(queue.arrive("running", "a.1"), 100)
    queue.arrive("first", "a.1")
    queue.arrive("sibling", "a.2")
    queue.arrive("other", "b")
    assert queue.num_waiting_of("a") == 2
    queue.set_apart(queue.adapters["a.1"], True, num_running=1)
    assert queue.num_waiting_of("a") == 2, "of its limit no version is apart"
    running = queue.arrive("second", "a.1")
    served = queue.served(running)
    queue.charge(running, 50)
    assert queue.names()[-1] == "first" and queue.served(queue.arrive("third", "a.2")) == served
    queue.set_apart(queue.adapters["a.1"], False, num_running=1)
    assert queue.num_waiting_of("a") == 4 and queue.served(running) == served


@pytest.mark.parametrize("is_first_waiting", [False, True])
def test_an_account_that_all_have_left_is_closed(is_first_waiting: bool) -> None:
    queue = NamedQueue()
    first = queue.arrive("first", "a.1")
    if not is_first_waiting:
        queue.start(first, 7)
    queue.set_apart(queue.adapters["a.1"], True, num_running=0 if is_first_waiting else 1)
    assert len(queue._accounts) == 1
    queue.forget(first)
    assert not queue._accounts and len(queue) == 0
    queue.set_apart(queue.adapters["a.1"], False, num_running=0)
    assert not queue._accounts


def test_who_waits_for_a_grammar_comes_to_the_account_that_its_version_has_by_then() -> None:
    queue = NamedQueue()
    queue.arrive("other", "a.2")
    held = queue.arrive("held", "a.1")
    queue.forget(held)
    held.waits_for_grammar = True
    queue.add(held)
    queue.set_apart(queue.adapters["a.1"], True, num_running=0)
    assert queue.num_waiting_of("a") == 2
    held.waits_for_grammar = False
    queue.wake_loaded()
    assert sorted(queue.names()) == ["held", "other"] and len(queue._accounts) == 2
    queue.forget(held)
    assert queue.num_waiting_of("a") == 1 and len(queue._accounts) == 1


def longest_gap_of_b(num_before: int, happens: Callable[[Server, Sequence], None]) -> int:
    """Steps in a row without b, after one long answer of a has run for so many steps and then something happens to it."""
    server, gap, longest = Server(num_blocks=60_000, num_pages=3, max_batch_tokens=64, max_running=8), 0, 0
    long = server.add_version("a", "old", [1], 100_000)
    asked: dict[str, list[Sequence]] = {"a.new": [], "b": []}
    for step in range(num_before + 400):
        for version, sequences in asked.items():
            sequences[:] = [sequence for sequence in sequences if not sequence.is_finished]
            while len(sequences) < 8 and (version == "b" or step > 5):
                sequences.append(server.add_version(version[0], version, [server.arrivals], 20))
        if step == 6:
            server.scheduler.adapters.pin(asked["a.new"][0].adapter)  # type: ignore[arg-type]
        if step == num_before:
            happens(server, asked["a.new"][0])
        server.turn()
        if step >= num_before:
            gap = 0 if any(sequence.slot is not None for sequence in asked["b"]) else gap + 1
            longest = max(longest, gap)
    assert not long.is_finished
    return longest


@pytest.mark.parametrize("num_before", [200, 800])
def test_a_flood_that_is_unpinned_gets_no_credit_of_a_version_that_asked_for_little(num_before: int) -> None:
    assert longest_gap_of_b(num_before, lambda server, flood: server.scheduler.adapters.unpin(flood.adapter)) < 20  # type: ignore[arg-type]


def test_who_gives_way_brings_no_credit_for_those_that_come_then() -> None:
    queue = NamedQueue()
    slow = queue.start(queue.arrive("slow", "a"), 10)
    busy = queue.start(queue.arrive("busy", "b"), 5000)
    queue.arrive("next", "b")
    queue.put_back(slow)
    slow.slot = None
    assert queue.served(queue.arrive("flood", "a")) == queue.served(busy) - MIN_HEAD_START


def test_the_time_of_a_load_is_no_credit_for_one_that_is_pinned_as_it_arrives() -> None:
    server = Server(num_blocks=4000, num_pages=4, max_batch_tokens=64, max_running=4)
    slow = server.add_version("s", "slow", [1], 400)
    assert slow.adapter
    slow.adapter.is_ready = False
    busy = [server.add_version("b", "b", [number], 10) for number in range(4)]
    for number in range(300):
        busy.append(server.add_version("b", "b", [number], 10))
        server.turn()
    slow.adapter.is_ready = True
    server.scheduler.adapters.pin(slow.adapter)
    server.turn()
    assert server.scheduler.waiting.served(slow) >= server.scheduler.waiting.served(busy[-1]) - 64


def test_a_version_is_apart_as_long_as_it_is_pinned_with_its_adapters_weight() -> None:
    server = Server(num_blocks=4000, num_pages=4, weights={"a": 4.0})
    queue, table = server.scheduler.waiting, server.scheduler.adapters
    pinned, sibling = server.add_version("a", "a.1", [1], 50), server.add_version("a", "a.2", [2], 50)
    assert pinned.adapter
    for _ in range(10):
        server.turn()
    before = queue.served(pinned)
    table.pin(pinned.adapter)
    server.add_version("b", "b", [3], 50)  # whose account, at the floor, is behind
    server.turn()
    assert pinned.adapter.is_apart and queue.weight_of(pinned) == 4.0 and queue.served(pinned) >= before
    assert len(queue._accounts) == 3 and table.take_repinned() == []
    table.unpin(pinned.adapter)
    server.turn()
    assert not pinned.adapter.is_apart and len(queue._accounts) == 2 and queue.served(pinned) == queue.served(sibling)
