"""Patterns of strangers match as `re` matches them, or are refused before they cost time or memory."""

import re
import threading
import time

import pytest

from loray.models.bounded_patterns import PatternBudget, PatternError

TEXT = "model.layers.10.self_attn.q_proj"
SLOW = r"((a|b|\w|.)*)*[!x]"
PATTERNS = [
    r".*\.q_proj", r".*\.(q|k)_proj", r".*layers\.(1[0-9])\..*", r"q_proj", r"(?i).*Q_PROJ", r"(?!.*vision).*q_proj", r".*\d{1,2}.*proj$",
    r"model.layers.10.self_attn.q_proj", r"(?P<x>m).*(?<=_)proj", r"(m)(o).*\2.*", r"[\w.]+", r"(?:[a-z0-9_]+\.?)+", r"\bmodel\b.*", "",
    r"(?>.*)q", r".*+", r"model\.[^.]+\..*", r".{0,99}", r"[[a-z]odel.*",
]  # fmt: skip
REFUSED = {
    "(": "no regular expression",
    "*": "no regular expression",
    r"\p{L}+": "braces",
    r"(?:q_pro){e<=1}": "braces",
    "[[:alpha:]]+": "named class",
    "(a)?(?(1)b|c)": "condition",
    r"(?|a|b)": "no regular expression",
    "(?a)(?u).*": "no regular expression",
    "a" * 5000: "5000 characters",
    "(" * 2000 + ")" * 2000: "too deeply nested",
    "é.*": "no module's name",
    r"(?i)[\u0000-\uffff]": "no module's name",
    "(?x)(a) +": "no module's name",
    "(?:" * 14 + "a" + ")+" * 14: "too many repetitions",
    "(?:" * 14 + "a" + "){1,}" * 14: "too many repetitions",
    "(?:" * 14 + "a" + "){1,}?" * 14: "too many repetitions",
    "((a{100}){100}){10}": "too many repetitions",
    "(){9999999999999999999}": "too many repetitions",
}


def quick(length: int) -> str:
    """A pattern that takes some tenths of a millisecond, four times as many with two more."""
    return r".*?\." + "(?:.|[^x])" * length + "[!?]"


@pytest.mark.filterwarnings("ignore:Possible nested set")
@pytest.mark.parametrize("pattern", PATTERNS)
def test_patterns_match_as_python_matches_them(pattern: str) -> None:
    budget = PatternBudget(5)
    for text in (TEXT, "q_proj", "", "model.layers.1.mlp.up_proj"):
        found = budget.first([budget.compile(pattern, is_full=True)], text)
        assert (found is not None) == (re.fullmatch(pattern, text) is not None)


@pytest.mark.filterwarnings("ignore:Possible nested set")
@pytest.mark.parametrize("pattern", REFUSED, ids=lambda pattern: pattern[:20])
def test_what_would_mean_something_else_or_grow_without_measure_is_refused(pattern: str) -> None:
    with pytest.raises(PatternError, match=REFUSED[pattern]):
        PatternBudget(5).compile(pattern)


def test_the_first_of_several_is_found() -> None:
    budget = PatternBudget(5)
    patterns = [budget.compile(pattern, r"(.*\.)?(", ")$") for pattern in ("k_proj", "self_attn.q_pro.", "q_proj")]
    found = budget.first(patterns, TEXT)
    assert found is not None and found[0] == 1
    assert budget.first(patterns, "self_attn") is None


def test_all_matches_together_have_one_budget() -> None:
    budget = PatternBudget(0.05)
    slow, quick = budget.compile(SLOW, is_full=True), budget.compile("q_proj")
    for pattern in (slow, quick):
        with pytest.raises(PatternError, match="too long"):
            budget.first([pattern], TEXT)


def test_many_quick_matches_use_the_budget_up_too() -> None:
    budget = PatternBudget(0.01)
    pattern = budget.compile(r".*\.(k|v)_proj")
    with pytest.raises(PatternError, match="too long"):
        for _ in range(100_000):
            budget.first([pattern], TEXT)


@pytest.mark.parametrize("length", [8, 10, 12])
def test_many_matches_of_one_search_end_with_the_budget(length: int) -> None:
    budget = PatternBudget(0.1)
    pattern = budget.compile(quick(length))
    began = time.thread_time()
    with pytest.raises(PatternError, match="too long"):
        budget.first([pattern] * 20_000, TEXT)
    assert time.thread_time() - began < 0.15


@pytest.mark.parametrize("pattern", [SLOW, quick(10)], ids=["one that is slow", "many that are quick"])
def test_other_threads_run_while_patterns_are_matched(pattern: str) -> None:
    num_turns, is_over = 0, threading.Event()

    def take_turns() -> None:
        nonlocal num_turns
        while not is_over.is_set():
            num_turns += 1
            time.sleep(0)  # lets go of the interpreter's lock, so that each turn has to get it again

    other = threading.Thread(target=take_turns)
    budget = PatternBudget(0.3)
    compiled = budget.compile(pattern)
    other.start()
    before = num_turns
    try:
        with pytest.raises(PatternError, match="too long"):
            budget.first([compiled] * 4096, TEXT)
        num_turns_meanwhile = num_turns - before
    finally:
        is_over.set()
        other.join()
    assert num_turns_meanwhile > 100
