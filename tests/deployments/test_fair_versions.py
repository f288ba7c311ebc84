"""Versions of one adapter, which are served as one: each has its turn in the pool."""

from dataclasses import dataclass, field

import pytest

from loray.deployments.sequence import Sequence
from tests.deployments.named_queue import NamedQueue
from tests.deployments.simulated_rank import greedy
from tests.deployments.stepped_scheduler import Server
from tests.deployments.traffic import output_of


@pytest.mark.parametrize("flood", ["a2", "b"])
def test_answers_of_a_version_that_was_replaced_end_whatever_else_is_asked(flood: str) -> None:
    server, number = Server(num_blocks=4000, num_pages=1, max_batch_tokens=32, max_running=4), 0
    begun = [server.add_version("a", "a1", [number], 200) for number in range(2)]
    for _ in range(20):
        server.turn()
    for _ in range(900):
        if server.scheduler.waiting.num_waiting_of("a") + server.scheduler.waiting.num_waiting_of("b") < 6:
            number += 1
            server.add_version(flood[0], flood, [number], 5)
            server.add_version("a", "a2", [number], 5)
        server.turn()
    assert [output_of(sequence) for sequence in begun] == [greedy("a1", [number], 200) for number in range(2)]


def test_of_two_versions_that_are_asked_for_each_has_its_turn() -> None:
    server, done = Server(num_blocks=400, num_pages=1, max_batch_tokens=16), {"a1": 0, "a2": 0}
    asked = {version: server.add_version("a", version, [1], 10) for version in done}
    for _ in range(300):
        server.turn()
        for version, sequence in asked.items():
            if sequence.is_finished:
                done[version] += 1
                asked[version] = server.add_version("a", version, [done[version]], 10)
    assert min(done.values()) > 8, done


def test_one_that_gave_way_brings_its_version_before_those_that_came_after_it() -> None:
    queue = NamedQueue()
    first = queue.start(queue.arrive("first", "a.1"))
    queue.arrive("newer", "a.2")
    queue.arrive("last", "a.1")
    assert queue.names() == ["newer", "last"]
    queue.put_back(first)
    assert queue.names() == ["first", "newer"]


@pytest.mark.parametrize("num_pages", [1, 8])
def test_a_version_that_is_asked_for_without_end_leaves_turns_to_another(num_pages: int) -> None:
    server = Server(num_blocks=4000, num_pages=num_pages, max_batch_tokens=32, max_running=4)
    for number in range(12):
        server.add_version("a", "hot", [number], 10)
    cold = server.add_version("a", "cold", [1], 10)
    for number in range(300):
        if server.scheduler.waiting.num_waiting_of("a") < 12:
            server.add_version("a", "hot", [number], 10)
        server.turn()
    assert output_of(cold) == greedy("cold", [1], 10)


@dataclass
class Clients:
    """Each asks again as soon as it has its answer."""

    version: str  # of the adapter that its first letter names; "" = the base model
    count: int
    num_output: int
    num_prompt: int = 1
    num_pages: int = 1
    asked: list[Sequence] = field(default_factory=list)
    num_answers: int = 0

    def ask(self, server: Server) -> None:
        self.num_answers += sum(sequence.is_finished for sequence in self.asked)
        self.asked = [sequence for sequence in self.asked if not sequence.is_finished]
        while len(self.asked) < self.count:
            prompt = [server.arrivals] * self.num_prompt
            if self.version:
                sequence = server.add_version(self.version[0], self.version, prompt, self.num_output, self.num_pages)
            else:
                sequence = server.add(prompt, self.num_output)
            self.asked.append(sequence)


def answers_of_each(server: Server, groups: list[Clients]) -> dict[str, int]:
    for _ in range(2000):
        for group in groups:
            group.ask(server)
        server.turn()
    return {group.version: group.num_answers for group in groups}


def test_a_version_whose_sibling_is_pinned_has_its_turn() -> None:
    server = Server(num_blocks=4000, num_pages=3, max_batch_tokens=64, max_running=8)
    asked = {"hot": [server.add_version("a", "hot", [1], 10)], "b": [], "c": []}
    hot = asked["hot"][0].adapter
    assert hot
    server.scheduler.adapters.pin(hot)
    cold, number = None, 0
    for _ in range(600):
        for version, sequences in asked.items():
            sequences[:] = [sequence for sequence in sequences if not sequence.is_finished]
            while len(sequences) < 4:
                number += 1
                sequences.append(server.add_version("a" if version == "hot" else version, version, [number], 10))
        if number > 40 and cold is None:
            cold = server.add_version("a", "cold", [1], 5)
        server.turn()
    assert cold and output_of(cold) == greedy("cold", [1], 5)


def test_a_version_that_finds_no_pages_has_those_leave_that_wait_for_a_slot() -> None:
    """There are slots for two, so most of what is in the pool does not run when the turn of one comes that is not."""
    server = Server(num_blocks=40_000, num_pages=3, max_batch_tokens=32, max_running=2)
    groups = [Clients("a1", 1, 10, num_prompt=60), Clients("a2", 1, 3, num_pages=2), Clients("b", 4, 3, num_prompt=20), Clients("", 4, 50)]
    num_answers = answers_of_each(server, groups)
    assert min(num_answers.values()) >= 8, num_answers


def test_versions_keep_their_order_whoever_gave_way_first_and_whoever_is_aborted() -> None:
    queue = NamedQueue()
    oldest = queue.start(queue.arrive("oldest", "a.1"))
    queue.arrive("other", "a.2")
    youngest = queue.start(queue.arrive("youngest", "a.1"))
    for sequence in (oldest, youngest):
        queue.put_back(sequence)
        sequence.slot = None
    queue.forget(youngest)
    assert queue.names() == ["oldest", "other"]


def test_of_those_that_gave_way_the_oldest_goes_on_first_then_the_next_oldest() -> None:
    queue = NamedQueue()
    first, second = (queue.start(queue.arrive(name, "a")) for name in ("first", "second"))
    queue.arrive("last", "a")
    for sequence in (first, second):
        queue.put_back(sequence)
        sequence.slot = None
    order = []
    for sequence in queue:
        order.append(sequence.request.request_id)
        queue.start(sequence)
    assert order == ["first", "second", "last"]
