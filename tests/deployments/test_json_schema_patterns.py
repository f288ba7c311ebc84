"""Patterns as xgrammar gets them take what Python's `re` takes, no more and no less, as whole answers and within JSON strings."""

import itertools
import json
import random
import re

import pytest
import xgrammar

from loray.deployments.json_schema_patterns import FORCES_RULES, Unenforceable, string_pattern, text_pattern
from tests.deployments.tiny_grammars import vocabulary

ALPHABET = "abé"
TEXTS = ["".join(text) for length in range(5) for text in itertools.product(ALPHABET, repeat=length)]
CHARACTERS = ["a", "b", "é", "[ab]", "[aé]", "[^a]", "[^é]", "."]
COUNTS = ["*", "+", "?", "{0,}", "{1,}", "{2}", "{0,1}", "{1,2}", "{0,2}", "{2,3}", "{2,}", "{0}"]
# What xgrammar's own automaton takes for more than it is.
WRONG_AS_AUTOMATA = [
    "(((b|b)){1,2}|b)", "(b|b{0,2})", "(a|éb{0,}|é)", "((b{2,})?){1,}", "((b{2,3})?){2,}", "(é|b|b(?:[^a]|))", "b?|b?a{0,2}",
    "(((a{1,2}){2,}|(éb){1,})){0,}", "(a[bé]+|){0,}|b", "a(a[bé]+|b){1,}|b*[^a]", "[ab]{0,2}||[ab]", "x(bé*|aé*)?",
]  # fmt: skip


def random_pattern(rng: random.Random, depth: int) -> str:
    kind = rng.random()
    if depth == 0 or kind < 0.2:
        return rng.choice(CHARACTERS)
    if kind < 0.45:
        branches = [random_pattern(rng, depth - 1) if rng.random() < 0.9 else "" for _ in range(rng.choice([1, 2, 2, 3]))]
        return f"({rng.choice(['', '?:'])}{'|'.join(branches)})"
    if kind < 0.7:
        return random_pattern(rng, depth - 1) + random_pattern(rng, depth - 1)
    return f"({random_pattern(rng, depth - 1)}){rng.choice(COUNTS)}"


def random_chain(rng: random.Random) -> str:
    return "".join(rng.choice(CHARACTERS) + rng.choice(["", "", *COUNTS]) for _ in range(rng.randrange(1, 5)))


def patterns(count: int) -> list[str]:
    rng = random.Random(5)
    return [*WRONG_AS_AUTOMATA, *(random_pattern(rng, 3) for _ in range(count)), *(random_chain(rng) for _ in range(count))]


def taken(compiled: xgrammar.CompiledGrammar, quote: str) -> list[str]:
    (eos_id,) = vocabulary().stop_token_ids
    matcher = xgrammar.GrammarMatcher(compiled)

    def is_whole(text: str) -> bool:
        matcher.reset()
        return matcher.accept_string(f"{quote}{text}{quote}") and matcher.accept_token(eos_id)

    return [text for text in TEXTS if is_whole(text)]


@pytest.fixture(scope="module")
def compiler() -> xgrammar.GrammarCompiler:
    return xgrammar.GrammarCompiler(vocabulary(), max_threads=1, cache_enabled=False)


def test_random_patterns_take_exactly_what_python_takes(compiler: xgrammar.GrammarCompiler) -> None:
    num_chains = 0
    for pattern in patterns(300):
        expected = [text for text in TEXTS if re.fullmatch(pattern, text)]
        assert taken(compiler.compile_regex(text_pattern(pattern)), "") == expected, pattern
        written = string_pattern(pattern, "")
        schema = json.dumps({"type": "string", "pattern": written})
        assert taken(compiler.compile_json_schema(schema, any_whitespace=False), '"') == expected, pattern
        num_chains += FORCES_RULES not in written
    assert num_chains > 100, "both of xgrammar's ways are tried"


@pytest.mark.parametrize("pattern", ["a|a{0,2}", "(ab)*", "(ab){2}", "x(ab|c)"])
def test_a_pattern_in_which_more_than_a_character_is_chosen_or_repeated_gets_rules(pattern: str) -> None:
    assert FORCES_RULES in string_pattern(pattern, "")


@pytest.mark.parametrize("pattern", ["[a-z]{1,64}", r"\d{4}-\d{2}", ".{1,200}x", "(a|b)(?:ab)"])
def test_a_pattern_of_single_characters_needs_none(pattern: str) -> None:
    assert FORCES_RULES not in string_pattern(pattern, "")


@pytest.mark.parametrize("pattern", [r"[ -~\\]", "[^x]", ".", r"\W", r"[\s\S]", '[a"]'])
def test_no_class_lets_a_quote_or_a_backslash_into_a_string(compiler: xgrammar.GrammarCompiler, pattern: str) -> None:
    for ends in ("", FORCES_RULES):
        schema = {"type": "string", "pattern": string_pattern(pattern, "")[:-1] + ends + "$"}
        compiled = compiler.compile_json_schema(json.dumps(schema), any_whitespace=False)
        assert [text for text in ('"""', '"\\"', '"\n"') if xgrammar.GrammarMatcher(compiled).accept_string(text)] == []


@pytest.mark.parametrize(
    ("pattern", "says"),
    [
        ("a(?=b)", "groups"), ("(?i)a", "groups"), ("(?i:a)", "groups"), (r"(a)\1", "groups"), ("(?>a)", "groups"), ("a*+", "++"),
        ("a^b", "ends"), ("(a$)b", "ends"), ("(^a)*", "ends"), (r"\bA", "ends"), (r"\n", "JSON escapes"), ('a"', "JSON escapes"),
        (r"\ud800", "there is not"), ("[]a]", "alike"), ("[^]a]", "alike"), ("a{,2}", "alike"),
        ("(", "no regular"), ("a{99999999999}", "no regular"),
    ],
)  # fmt: skip
def test_what_cannot_be_held_is_refused_by_name(pattern: str, says: str) -> None:
    with pytest.raises(Unenforceable, match=r"^place: pattern ") as caught:
        string_pattern(pattern, "/place")
    assert says in str(caught.value)


def test_anchors_at_both_ends_change_nothing() -> None:
    for pattern in ("^(ab|c)$", "^ab|c$", "(?:^ab|c)$", "^^(ab|c)$$", "^^ab|c$$"):
        assert string_pattern(pattern, "") == string_pattern("ab|c", "")
    assert string_pattern("^^$$", "") == string_pattern("", "")
