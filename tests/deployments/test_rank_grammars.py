"""The driver's book of compiled grammars: who waits for one, what is ordered and what is dropped."""

import pytest

from loray.cluster.channel import Address
from loray.deployments import rank_grammars as module
from loray.deployments.rank_grammars import RankGrammars
from loray.deployments.request import GenerationRequest
from loray.deployments.sequence import Sequence
from loray.models.step import Sampling, grammar_key
from tests.deployments.rank_in_process import RankInProcess, start_engine
from tests.deployments.simulated_rank import greedy
from tests.deployments.test_engine import Client


def sequence(grammar: bytes = b"") -> Sequence:
    request = GenerationRequest(request_id="r", prompt_ids=[1], max_new_tokens=1, sampling=Sampling(grammar=grammar))
    return Sequence(request, None, Address("nowhere", b""), 0)


def wanted(book: RankGrammars, grammar: bytes) -> Sequence:
    one = sequence(grammar)
    book.want(one)
    return one


def arrive(book: RankGrammars, grammar: bytes, num_bytes: int = 1, error: str = "") -> None:
    book.arrived(grammar_key(grammar), num_bytes, error)


def test_a_grammar_is_ordered_once_and_all_its_sequences_wait_for_it() -> None:
    book = RankGrammars()
    first, second, plain = wanted(book, b"a"), wanted(book, b"a"), wanted(book, b"")
    assert book.take_orders() == ([b"a"], [])
    third = wanted(book, b"a")
    assert book.take_orders() == ([], [])
    assert [one.waits_for_grammar for one in (first, second, third, plain)] == [True, True, True, False]
    arrive(book, b"a")
    assert not any(one.waits_for_grammar for one in (first, second, third, wanted(book, b"a")))
    assert book.take_orders() == ([], [])


def test_a_grammar_whose_sequences_are_gone_before_its_turn_is_never_ordered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_COMPILING", 1)
    book = RankGrammars()
    ordered, gone, late = wanted(book, b"a"), wanted(book, b"b"), wanted(book, b"c")
    assert book.take_orders() == ([b"a"], [])
    book.release(gone)
    book.release(ordered)  # the ranks compile it to the end all the same
    arrive(book, b"a")
    assert book.take_orders() == ([b"c"], []) and late.waits_for_grammar
    assert not wanted(book, b"a").waits_for_grammar


def test_what_nobody_needs_is_dropped_for_room_and_what_is_needed_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_BYTES", 11)
    book = RankGrammars()
    old, new, used = wanted(book, b"old"), wanted(book, b"new"), wanted(book, b"used")
    book.take_orders()
    for grammar in (b"old", b"new", b"used"):
        arrive(book, grammar, 5)
    book.release(old)
    book.release(new)
    book.release(wanted(book, b"old"))  # which makes the other the least recently wanted
    later = wanted(book, b"later")
    assert book.take_orders() == ([b"later"], [grammar_key(b"new")])
    arrive(book, b"later", 6)
    last = wanted(book, b"last")
    assert book.take_orders() == ([], [grammar_key(b"old")]), "those that are left are needed"
    book.release(later)
    assert book.take_orders() == ([b"last"], [grammar_key(b"later")]) and last.waits_for_grammar and not used.waits_for_grammar


def test_where_the_ranks_failed_the_sequences_run_and_nothing_is_kept() -> None:
    book = RankGrammars()
    one = wanted(book, b"a")
    book.take_orders()
    arrive(book, b"a", error="no room")
    assert not one.waits_for_grammar
    again = wanted(book, b"a")
    assert book.take_orders() == ([], [grammar_key(b"a")]), "never both in one step"
    assert book.take_orders() == ([b"a"], []) and again.waits_for_grammar
    book.release(one)
    book.release(again)


def test_a_request_waits_for_its_grammar_and_holds_up_no_other() -> None:
    steps = RankInProcess()
    steps.slow_grammars = {b"a dead end"}
    engine = start_engine(steps)
    client = Client(engine)
    client.submit("slow", [1, 2], sampling=Sampling(grammar=b"a dead end"))
    client.submit("plain", [1, 2])
    assert client.tokens("plain") == greedy("", [1, 2], 8)
    assert not any(admission.sampling.grammar for step in steps.rank.steps for admission in step.admissions)
    client.submit("left", [1, 2], sampling=Sampling(grammar=b"a dead end"))
    engine.abort("left")
    assert client.ended["left"].wait(5)
    steps.compile(b"a dead end")
    assert client.finish("slow")[-1].message == "a dead end", "the rank was asked to follow it"
    assert steps.compiled == [b"a dead end"]


def test_the_grammar_of_a_request_that_has_ended_makes_room_for_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_BYTES", 1)
    steps = RankInProcess()
    client = Client(start_engine(steps))
    for grammar in (b"a dead end", b"no vocabulary"):
        client.submit(grammar.decode(), [1, 2], sampling=Sampling(grammar=grammar))
        assert client.finish(grammar.decode())[-1].message == grammar.decode()
    assert [key for step in steps.rank.steps for key in step.dropped_grammars][0] == grammar_key(b"a dead end")
