"""Two ranks' loaders and the driver's end, over real sockets; in place of a rank's memory stands a dictionary."""

import threading
from queue import SimpleQueue

import pytest

from loray.cluster.host_loads import NUM_READERS, HostLoader, HostReports, Prepared
from loray.models.adapter import AdapterError
from loray.models.step import HostCopy, Step, grammar_key


class GrammarMemory:
    def __init__(self) -> None:
        self.held: set[bytes] = set()

    def prepare(self, grammar: bytes) -> int:
        if grammar == b"bad":
            raise RuntimeError("is none")
        self.held.add(grammar_key(grammar))
        return len(grammar)

    def drop(self, key: bytes) -> None:
        self.held.discard(key)


class Memory:
    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self.held: set[tuple[str, str]] = set()
        self.torn: set[str] = set()
        self.door = threading.Event()
        self.door.set()
        self.grammars = GrammarMemory()

    def prepare(self, path: str, signature: str) -> int:
        if path == "slow":
            assert self.door.wait(30)
        if path == "torn" or path in self.torn:
            raise AdapterError(f"{path}: cannot be read")
        if path == "bug":
            raise ZeroDivisionError("bug")
        self.held.add((path, signature))
        return self.num_bytes

    def drop(self, path: str, signature: str) -> None:
        self.held.discard((path, signature))


class Ranks:
    def __init__(self) -> None:
        self.memories = [Memory(10), Memory(12)]
        reports = HostReports("127.0.0.1", 2)
        self.loaders = [HostLoader(memory, memory.grammars, reports.address, rank) for rank, memory in enumerate(self.memories)]
        self.prepared: SimpleQueue[Prepared] = SimpleQueue()
        reports.start(self.prepared.put)

    def step(self, prepares: list[str] | None = None, drops: list[str] | None = None) -> None:
        step = Step(1, [], [], [], [HostCopy(path, "s") for path in prepares or []], [HostCopy(path, "s") for path in drops or []])
        for loader in self.loaders:
            loader.prepare(step)
            loader.drop(step)

    def next(self) -> Prepared:
        return self.prepared.get(timeout=10)


def test_an_adapter_is_there_when_every_rank_has_read_it() -> None:
    ranks = Ranks()
    ranks.memories[1].door.clear()
    ranks.step(["slow"])
    ranks.step(["a"])
    assert ranks.next().copy == HostCopy("a", "s"), "one that takes long does not hold others up"
    ranks.memories[1].door.set()
    slow = ranks.next()
    assert (slow.copy.path, slow.num_bytes, slow.error) == ("slow", 12, "")
    assert all(memory.held == {("slow", "s"), ("a", "s")} for memory in ranks.memories)
    ranks.step(drops=["a"])
    assert all(memory.held == {("slow", "s")} for memory in ranks.memories)


@pytest.mark.parametrize("rank", [0, 1])
def test_what_one_rank_can_not_read_has_failed(rank: int) -> None:
    ranks = Ranks()
    ranks.memories[rank].torn = {"half"}
    ranks.step(["half"])
    assert "half" in ranks.next().error


def test_a_failure_of_any_kind_is_reported_and_the_next_is_read() -> None:
    ranks = Ranks()
    ranks.step(["torn", "bug"])
    errors = {prepared.copy.path: prepared.error for prepared in (ranks.next(), ranks.next())}
    assert errors["torn"] == "torn: cannot be read" and "ZeroDivisionError" in errors["bug"]
    ranks.step([str(i) for i in range(3 * NUM_READERS)])
    assert {ranks.next().error for _ in range(3 * NUM_READERS)} == {""}


def test_a_grammar_is_there_when_every_rank_has_compiled_it_and_one_that_is_none_says_so() -> None:
    ranks = Ranks()
    for loader in ranks.loaders:
        loader.prepare(Step(1, [], [], [], grammars=[b"good", b"bad"]))
    found = {prepared.grammar: prepared for prepared in (ranks.next(), ranks.next())}
    assert (found[grammar_key(b"good")].num_bytes, found[grammar_key(b"good")].error) == (4, "")
    assert "is none" in found[grammar_key(b"bad")].error
    assert all(memory.grammars.held == {grammar_key(b"good")} for memory in ranks.memories)
    for loader in ranks.loaders:
        loader.drop(Step(2, [], [], [], dropped_grammars=[grammar_key(b"good")]))
    assert not any(memory.grammars.held for memory in ranks.memories)
