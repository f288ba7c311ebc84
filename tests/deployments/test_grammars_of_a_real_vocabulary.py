"""What only shows with a vocabulary of tens of thousands: many tools and limited strings compile, travel and allow what they should."""

import json
import zlib
from typing import Any

import numpy as np
import pytest
import xgrammar

from loray.deployments.config import GrammarArgs
from loray.deployments.grammar_worker import Job, _outcome
from loray.deployments.tool_format import structural_tag
from loray.models.checkpoint import resolve_model
from loray.models.compiled_grammars import CompiledGrammars

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def ranks() -> CompiledGrammars:
    return CompiledGrammars(resolve_model("smollm2-135m"))


def compiled(ranks: CompiledGrammars, kind: str, text: str) -> xgrammar.CompiledGrammar:
    """As an ingress and then a rank do it."""
    outcome = _outcome(xgrammar.GrammarCompiler(ranks.vocabulary(), max_threads=1, cache_enabled=False), Job(kind, text, 60.0))
    assert not outcome.refusal and outcome.num_bytes < GrammarArgs().max_compiled_bytes / 4
    rules = zlib.compress(outcome.rules.encode())
    assert len(rules) < 100_000
    return ranks.get(rules)


def tool(index: int) -> dict[str, Any]:
    properties: dict[str, Any] = {f"text{i}_{index}": {"type": "string"} for i in range(4)}
    properties |= {"count": {"type": "integer"}, "unit": {"enum": ["a", "b", "c"]}}
    parameters = {"type": "object", "properties": properties, "required": list(properties)[:2]}
    return {"type": "function", "function": {"name": f"tool_{index}", "parameters": parameters}}


def test_twenty_tools_are_all_callable_and_no_others(ranks: CompiledGrammars) -> None:
    grammar = compiled(ranks, "structural_tag", structural_tag([tool(index) for index in range(20)], True, False))
    for index in range(21):
        arguments = {f"text0_{index}": "x", f"text1_{index}": "y"}
        call = f'<tool_call>\n{{"name": "tool_{index}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'
        assert xgrammar.GrammarMatcher(grammar).accept_string(call) == (index < 20)


def test_a_form_of_limited_strings_takes_each_up_to_its_limit(ranks: CompiledGrammars) -> None:
    limits = {"name": 80, "street": 100, "city": 60, "email": 120, "zip": 10, "phone": 20, "country": 56}
    properties = {name: {"type": "string", "maxLength": most} for name, most in limits.items()}
    schema = {"type": "object", "properties": properties, "required": list(limits), "additionalProperties": False}
    grammar = compiled(ranks, "json_schema", json.dumps(schema))
    longest = {name: "é" * most for name, most in limits.items()}
    assert xgrammar.GrammarMatcher(grammar).accept_string(json.dumps(longest, ensure_ascii=False))
    for name, most in limits.items():
        text = json.dumps(longest | {name: "é" * (most + 1)}, ensure_ascii=False)
        assert not xgrammar.GrammarMatcher(grammar).accept_string(text)


def test_the_masks_of_a_long_limited_string_allow_what_fits(ranks: CompiledGrammars) -> None:
    grammar = compiled(ranks, "json_schema", json.dumps({"type": "string", "maxLength": 500}))
    vocabulary = ranks.vocabulary()
    bits = xgrammar.allocate_token_bitmask(1, vocabulary.vocab_size)
    plain = {
        token_id: text
        for token_id, text in enumerate(vocabulary.decoded_vocab)
        if text and text.decode("latin-1").isalnum() and text.isascii()
    }
    for length in (0, 8, 15, 16, 250, 484, 490, 497, 499, 500):
        matcher = xgrammar.GrammarMatcher(grammar)
        assert matcher.accept_string('"' + "a b" * (length // 3) + "x" * (length % 3))
        matcher.fill_next_token_bitmask(bits)
        allowed = np.unpackbits(bits.numpy().view(np.uint8), bitorder="little")
        assert {token_id for token_id in plain if allowed[token_id]} == {i for i, text in plain.items() if length + len(text) <= 500}


def test_memory_that_runs_out_is_told_as_such_whichever_call_it_is() -> None:
    class Compiler:
        def compile_grammar(self, grammar: xgrammar.Grammar) -> None:
            raise RuntimeError("std::bad_alloc")

    assert _outcome(Compiler(), Job("regex", "a", 60.0)).refusal == "takes too much memory to compile"
