"""Grammars as ranks get them: every text they let pass fits, and what can't be enforced or compiled fails alone and says why."""

import asyncio
import json
from collections.abc import Iterator, Sequence
from typing import Any

import jsonschema
import pytest
import xgrammar

from loray.deployments import grammars as module
from loray.deployments.errors import InvalidRequest, Overloaded
from loray.deployments.grammars import Grammars, GrammarSpec
from tests.deployments.tiny_grammars import grammars, random_text, read, shared_grammars
from tests.deployments.varied_schemas import ENFORCEABLE, REFUSED

TEXTS = 3  # of each schema
# Choosing so many of so many names takes xgrammar minutes.
EXPLOSIVE = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(1000)}, "minProperties": 300, "maxProperties": 600}


def compiled(kind: Any, text: str = "", of: Grammars | None = None) -> bytes:
    return asyncio.run((of or shared_grammars()).compile(GrammarSpec(kind, text), "response_format"))


def refusal(kind: Any, text: str, of: Grammars | None = None) -> str:
    with pytest.raises(InvalidRequest) as caught:
        compiled(kind, text, of)
    assert caught.value.param == "response_format"
    assert caught.value.message.startswith("response_format: ")
    return caught.value.message


def name(schema: Any) -> str:
    return json.dumps(schema[0] if isinstance(schema, tuple) else schema, ensure_ascii=False)[:70]


@pytest.mark.parametrize("schema", ENFORCEABLE, ids=name)
def test_every_text_is_valid_against_the_schema(schema: Any) -> None:
    grammar = compiled("json_schema", json.dumps(schema))
    texts = [text for seed in range(TEXTS) if (text := random_text(grammar, seed)) is not None]
    assert texts
    for text in texts:
        jsonschema.validate(json.loads(text), schema, jsonschema.Draft202012Validator)


@pytest.mark.parametrize("case", REFUSED, ids=name)
def test_a_schema_that_cannot_be_enforced_is_refused_by_its_place_and_reason(case: tuple[Any, str]) -> None:
    schema, reason = case
    assert reason in refusal("json_schema", json.dumps(schema))


def test_a_json_object_is_any_object_and_nothing_else() -> None:
    grammar = compiled("json_object")
    assert all(isinstance(json.loads(text), dict) for seed in range(TEXTS) if (text := random_text(grammar, seed)) is not None)


def test_a_regular_expression_and_a_grammar_hold_from_end_to_end() -> None:
    assert random_text(compiled("regex", "a{3}-(b|c)"), 0) in ("aaa-b", "aaa-c")
    assert random_text(compiled("ebnf", 'root ::= "yes" | "no"'), 0) in ("yes", "no")


def taken(pattern: str, texts: Sequence[str | bytes]) -> list[str | bytes]:
    grammar = read(compiled("json_schema", json.dumps({"type": "string", "pattern": pattern})))
    quoted = [b'"' + (text if isinstance(text, bytes) else text.encode()) + b'"' for text in texts]
    return [text for text, string in zip(texts, quoted, strict=True) if xgrammar.GrammarMatcher(grammar).accept_string(string)]


@pytest.mark.parametrize("pattern", [r"^\S$", r"^[\S]$", r"^[^\s]$", r"^[x[\S]$", r"^[a[]?\S$"])
def test_spaces_beyond_ascii_are_spaces(pattern: str) -> None:
    assert taken(pattern, " \u0085\u00a0\u2003\u3000\ufeffa日") == ["a", "日"]


@pytest.mark.parametrize("pattern", ["^.$", r"^\S$", r"^\D$", r"^\W$", r"^[\S\D\W]$", "^[^x]$", "^[^^]$"])
def test_what_is_no_utf8_is_no_character(pattern: str) -> None:
    """A detokenizer would make several characters of such bytes."""
    broken = [b"\xe0\x80\x80", b"\xe0\x9f\xbf", b"\xf0\x80\x80\x80", b"\xf0\x8f\xbf\xbf", b"\xed\xa0\x80", b"\xf4\x90\x80\x80"]
    assert taken(pattern, [*broken, "\u00a1", "\u0800", "\U00010000", "🙂"]) == ["\u00a1", "\u0800", "\U00010000", "🙂"]


def test_a_string_of_limited_length_has_whole_characters_only() -> None:
    grammar = read(compiled("json_schema", json.dumps({"type": "string", "maxLength": 2})))
    assert not any(xgrammar.GrammarMatcher(grammar).accept_string(b'"' + bad + b'"') for bad in (b"\xe0\x80\x80", b"\xf0\x80\x80\x80"))
    assert xgrammar.GrammarMatcher(grammar).accept_string('"ࠀ🙂"') and not xgrammar.GrammarMatcher(grammar).accept_string('"abc"')


def test_a_dot_is_no_new_line() -> None:
    grammar = read(compiled("regex", "a.b"))
    assert [text for text in ("a\nb", "axb", "a日b") if xgrammar.GrammarMatcher(grammar).accept_string(text)] == ["axb", "a日b"]


def test_the_schemas_of_a_structural_tag_are_checked_too() -> None:
    def tag(schema: Any) -> str:
        content = {"type": "json_schema", "json_schema": schema}
        return json.dumps({"type": "structural_tag", "format": {"type": "tag", "begin": "<call>", "content": content, "end": "</call>"}})

    text = random_text(compiled("structural_tag", tag({"type": "object", "properties": {"q": {"const": 1}}, "required": ["q"]})), 0)
    assert text and text.startswith("<call>") and json.loads(text[6:-7]) == {"q": 1}
    assert "uniqueItems" in refusal("structural_tag", tag({"type": "array", "uniqueItems": True}))


@pytest.mark.parametrize(
    ("kind", "text", "says"),
    [
        ("json_schema", '{"type":', "not valid JSON"),
        ("json_schema", "[" * 20_000 + "]" * 20_000, "too deep"),
        ("json_schema", '{"enum": ["\\ud800"]}', "JSON"),
        ("regex", "\ud800", "surrogate"),
        ("regex", "(a", "regular expression"),
        ("regex", "(" * 20_000 + "a" + ")" * 20_000, "too deep"),
        ("ebnf", 'root ::= "yes" | nope', "nope"),
        ("ebnf", "", "root"),
        ("structural_tag", "{}", "format"),
    ],
)
def test_what_cannot_be_read_is_refused(kind: str, text: str, says: str) -> None:
    assert says in refusal(kind, text)


@pytest.fixture(scope="module")
def limited() -> Iterator[Grammars]:
    made = grammars(compile_timeout_s=3, max_compiled_bytes="200KiB")
    yield made
    made.close()


def test_a_schema_that_explodes_is_given_up_while_others_go_on(limited: Grammars) -> None:
    async def both() -> None:
        await asyncio.gather(*(limited.compile(GrammarSpec("regex", text), "response_format") for text in "ab"))  # starts the processes
        exploding = asyncio.create_task(limited.compile(GrammarSpec("json_schema", json.dumps(EXPLOSIVE)), "response_format"))
        await asyncio.sleep(0)
        assert await limited.compile(GrammarSpec("json_schema", '{"type": "null"}'), "response_format")
        assert not exploding.done(), "it takes its time, and holds up nobody"
        with pytest.raises(InvalidRequest, match="takes more than 3 s to compile"):
            await exploding

    asyncio.run(both())
    assert compiled("json_schema", '{"type": "boolean"}', limited)


def test_sizes_are_limited(limited: Grammars) -> None:
    def names(count: int) -> str:
        return json.dumps({"enum": [f"value {index}" for index in range(count)]})

    assert "more than grammars.max_text_bytes" in refusal("regex", "a" * 300_000)
    assert "more than grammars.max_compiled_bytes" in refusal("json_schema", names(5000), limited)
    poor = grammars(max_compile_bytes="1MiB")
    assert "memory" in refusal("json_schema", names(10_000), poor)
    poor.close()


def test_one_schema_is_compiled_once_for_all_who_want_it(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = []
    worker_ask = module.WorkerProcess.ask
    monkeypatch.setattr(module.WorkerProcess, "ask", lambda self, job: jobs.append(job) or worker_ask(self, job))
    spec = GrammarSpec("json_schema", '{"const": "once"}')

    async def many() -> list[bytes]:
        return await asyncio.gather(*(shared_grammars().compile(spec, "response_format") for _ in range(5)))

    assert len(set(asyncio.run(many()))) == 1
    compiled(spec.kind, spec.text)
    assert len(jobs) == 1


def test_a_client_that_leaves_takes_nothing_from_those_who_wait_for_the_same() -> None:
    spec = GrammarSpec("json_schema", '{"const": "shared"}')

    async def one_leaves() -> bytes:
        leaving = asyncio.create_task(shared_grammars().compile(spec, "response_format"))
        await asyncio.sleep(0)
        staying = asyncio.create_task(shared_grammars().compile(spec, "response_format"))
        leaving.cancel()
        return await staying

    assert read(asyncio.run(one_leaves()))


def test_grammars_beyond_the_bound_wait_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_PENDING", 0)
    with pytest.raises(Overloaded):
        compiled("json_schema", '{"const": "one too many"}')
