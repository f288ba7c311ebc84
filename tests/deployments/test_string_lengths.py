"""Strings between two lengths: every length that may be and no other, whichever characters they have and wherever they stand."""

import json
import random
from typing import Any

import numpy as np
import pytest
import xgrammar

from loray.deployments.string_lengths import BLOCK, MAX_LENGTH, with_lengths
from tests.deployments.test_grammars import compiled, refusal
from tests.deployments.tiny_grammars import read, texts_of_tokens, vocabulary

pytestmark = pytest.mark.slow

BOUNDS = [(0, 0), (0, 7), (3, 7), (0, 31), (0, 32), (0, 33), (1, 47), (20, 31), (20, 40), (31, 64), (32, 33), (100, 100), (50, 131)]


def takes(grammar: xgrammar.CompiledGrammar, text: str) -> bool:
    return xgrammar.GrammarMatcher(grammar).accept_string(text)


def grammar_of(schema: Any) -> xgrammar.CompiledGrammar:
    return read(compiled("json_schema", json.dumps(schema)))


@pytest.mark.parametrize(("least", "most"), [*BOUNDS, (0, None), (5, None), (40, None)])
def test_every_length_between_the_bounds_is_taken_and_no_other(least: int, most: int | None) -> None:
    grammar = grammar_of({"type": "string", "minLength": least} | ({} if most is None else {"maxLength": most}))
    longest = (most or least) + 2 * BLOCK
    mixed = "".join(random.Random(least).choices("ab Zé日🙂1", k=longest))
    for text in ("a" * longest, "é" * longest, "🙂" * longest, mixed):
        taken = [length for length in range(longest + 1) if takes(grammar, json.dumps(text[:length], ensure_ascii=False))]
        assert taken == [length for length in range(longest + 1) if least <= length <= (longest if most is None else most)]


@pytest.mark.parametrize(("least", "most"), [(0, 20), (0, 50), (4, 50), (40, 60)])
def test_a_mask_allows_the_tokens_that_fit_and_no_others(least: int, most: int) -> None:
    grammar, rng = grammar_of({"type": "string", "minLength": least, "maxLength": most}), random.Random(0)
    bits = xgrammar.allocate_token_bitmask(1, vocabulary().vocab_size)
    for length in range(most + 1):
        matcher = xgrammar.GrammarMatcher(grammar)
        assert matcher.accept_string('"' + "".join(rng.choices("ab é", k=length)))
        matcher.fill_next_token_bitmask(bits)
        allowed = set(np.unpackbits(bits.numpy().view(np.uint8), bitorder="little").nonzero()[0].tolist())
        fits = [matcher.fork().accept_string(text) if text else False for text in texts_of_tokens()]
        assert allowed == {token_id for token_id, fit in enumerate(fits) if fit}


def test_names_and_many_limits_at_once_are_held_too() -> None:
    limits = {"name": 80, "street": 100, "city": 60, "zip": 10, "grüße": 56}
    schema = {"type": "object", "properties": {name: {"type": "string", "maxLength": most} for name, most in limits.items()}}
    form = grammar_of(schema | {"required": list(limits), "additionalProperties": False})
    longest = {name: "x" * most for name, most in limits.items()}
    assert takes(form, json.dumps(longest, ensure_ascii=False))
    assert not any(takes(form, json.dumps(longest | {name: "x" * (most + 1)}, ensure_ascii=False)) for name, most in limits.items())
    names = grammar_of({"type": "object", "propertyNames": {"minLength": 2, "maxLength": 40}, "additionalProperties": {"type": "null"}})
    assert [length for length in (1, 2, 40, 41) if takes(names, json.dumps({"n" * length: None}))] == [2, 40]


def test_beyond_what_is_counted_a_string_has_at_most_so_many_and_a_minimum_is_refused() -> None:
    grammar = grammar_of({"type": "string", "maxLength": 10 * MAX_LENGTH})
    assert [count for count in (0, MAX_LENGTH, MAX_LENGTH + 1) if takes(grammar, '"' + "a" * count + '"')] == [0, MAX_LENGTH]
    assert "minLength" in refusal("json_schema", json.dumps({"type": "string", "minLength": MAX_LENGTH + 1}))


@pytest.mark.parametrize("text", ["ße", "\x80\\xdfe", '\\"\x7f0', "\u07ffé日🙂", "\n\t\x01", "\\u0041\\"])
def test_the_rest_of_a_grammar_stays_as_it_is(text: str) -> None:
    rules = xgrammar.Grammar.from_json_schema(json.dumps({"enum": [text, {text: 1}]}), any_whitespace=False)
    assert str(xgrammar.Grammar.from_ebnf(with_lengths(str(rules)))) == str(rules)
