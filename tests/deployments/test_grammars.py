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


def test_what_is_optional_is_whole_or_not_there() -> None:
    assert taken("^x(bc*|ac*)?$", ["x", "xb", "xacc", "xc", "xcc"]) == ["x", "xb", "xacc"]
    assert taken(r"^[)]?(?:\)?b)?$", ["", ")", "b", "))b", "))"]) == ["", ")", "b", "))b"]


def test_a_string_of_limited_length_has_whole_characters_only() -> None:
    grammar = read(compiled("json_schema", json.dumps({"type": "string", "maxLength": 2})))
    assert not any(xgrammar.GrammarMatcher(grammar).accept_string(b'"' + bad + b'"') for bad in (b"\xe0\x80\x80", b"\xf0\x80\x80\x80"))
    assert xgrammar.GrammarMatcher(grammar).accept_string('"ࠀ🙂"') and not xgrammar.GrammarMatcher(grammar).accept_string('"abc"')


@pytest.mark.parametrize(("least", "most"), [(0, 700), (3, 700), (0, 2100), (2050, 2100), (2050, None)])
def test_long_strings_have_as_many_characters_as_they_may(least: int, most: int | None) -> None:
    bounds = {"minLength": least} if most is None else {"minLength": least, "maxLength": most}
    grammar = read(compiled("json_schema", json.dumps({"type": "string", **bounds})))
    near = {bound + change for bound in (9, least, most or 5000) for change in range(-9, 10)}
    lengths = sorted(length for length in {*near, 350, 1000} if length >= 0)
    taken = [length for length in lengths if xgrammar.GrammarMatcher(grammar).accept_string(json.dumps("é" * length, ensure_ascii=False))]
    assert taken == [length for length in lengths if least <= length <= (most or length)]


@pytest.mark.parametrize("declared", [["a", "ab"], ["abc", 'q"', "日本"], [""]])
def test_a_declared_name_comes_with_its_own_value_however_it_is_spelled(declared: list[str]) -> None:
    properties = {name: {"type": "integer"} for name in declared}
    grammar = read(compiled("json_schema", json.dumps({"properties": properties, "additionalProperties": {"type": "string"}})))
    names = ["", "a", "ab", "abc", "abcd", "b", "日", "日本", 'q"']
    spelled = [*(json.dumps(name, ensure_ascii=False) for name in names), '"\\u0061"', '"\\u0061bc"', '"\\u65e5\\u672c"']
    taken = [name for name in spelled if xgrammar.GrammarMatcher(grammar).accept_string(f'{{{name}: "text"}}')]
    assert [json.loads(name) for name in taken] == [name for name in names if name not in declared and name != 'q"']


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
        ("ebnf", "root ::= root", "none of the model's tokens"),
        ("regex", r"a[^\s\S]", "a character that"),
        ("regex", r"(a)\1", "groups"),
    ],
)
def test_what_cannot_be_read_is_refused(kind: str, text: str, says: str) -> None:
    assert says in refusal(kind, text)


def test_what_xgrammar_would_ignore_is_refused_by_a_worker_that_refused_before() -> None:
    for char in "abc":  # one more than workers
        text = json.dumps({"type": "structural_tag", "format": {"type": "regex", "pattern": rf"\A{char}"}})
        assert "not recognized" in refusal("structural_tag", text)


@pytest.fixture(scope="module")
def limited() -> Iterator[Grammars]:
    made = grammars(compile_timeout_s=3, max_compiled_bytes="200KiB", cache_bytes="256KiB")
    yield made
    made.close()


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch) -> list[type | None]:
    """How the workers' jobs ended, so far: with what exception, if any."""
    ended: list[type | None] = []
    worker_ask = module.WorkerProcess.ask

    def ask(self: module.WorkerProcess, job: bytes) -> bytes:
        place = len(ended)
        ended.append(None)
        try:
            return worker_ask(self, job)
        except module.WorkerLost as error:
            ended[place] = type(error)
            raise

    monkeypatch.setattr(module.WorkerProcess, "ask", ask)
    return ended


@pytest.mark.slow
def test_a_schema_that_explodes_is_given_up_while_others_go_on(limited: Grammars, jobs: list[type | None]) -> None:
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
    num_jobs = len(jobs)
    assert "takes more than 3 s" in refusal("json_schema", json.dumps(EXPLOSIVE), limited)
    assert len(jobs) == num_jobs, "it is not tried again at once"


@pytest.mark.slow
def test_many_that_explode_leave_a_worker_to_the_others(limited: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "QUICK_S", 0.2)
    monkeypatch.setattr(module, "LEFT_S", 0.0)
    exploding = [GrammarSpec("json_schema", json.dumps({**EXPLOSIVE, "title": title})) for title in ("1", "2", "3", "4", "5")]

    async def one_is_quick() -> None:
        await asyncio.gather(*(limited.compile(GrammarSpec("regex", text), "response_format") for text in "cd"))  # starts the processes
        tasks = [asyncio.create_task(limited.compile(spec, "response_format")) for spec in exploding]
        await asyncio.sleep(0)
        assert await limited.compile(GrammarSpec("regex", "quick"), "response_format")
        assert not any(task.done() for task in tasks)
        with pytest.raises(InvalidRequest, match="takes more than 3 s to compile"):
            await tasks[0]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert await limited.compile(GrammarSpec("regex", "afterwards"), "response_format")

    asyncio.run(one_is_quick())


@pytest.mark.slow
def test_the_cache_keeps_the_last_used_that_fit(limited: Grammars, jobs: list[type | None]) -> None:
    first, *others = (json.dumps({"type": "null", "description": letter * 20_000}) for letter in "abcd")  # 80 KB of the cache each
    for text in (first, others[0], first, others[1], first, others[2], first):
        compiled("json_schema", text, limited)
    assert len(jobs) == 4
    compiled("json_schema", others[0], limited)
    assert len(jobs) == 5


@pytest.mark.slow
def test_what_nobody_waits_for_any_more_leaves_its_place_and_its_worker(
    limited: Grammars, jobs: list[type | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_PENDING", 4)
    monkeypatch.setattr(module, "LEFT_S", 0.0)
    exploding = [GrammarSpec("json_schema", json.dumps({**EXPLOSIVE, "title": title})) for title in "abcd"]

    async def all_leave() -> None:
        tasks = [asyncio.create_task(limited.compile(spec, "response_format")) for spec in exploding]
        while not jobs:
            await asyncio.sleep(0.01)
        with pytest.raises(Overloaded):
            await limited.compile(GrammarSpec("regex", "too many"), "response_format")
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert await limited.compile(GrammarSpec("regex", "now"), "response_format")
        while None in jobs[:-1]:
            await asyncio.sleep(0.01)

    asyncio.run(all_leave())
    *left, good = jobs
    assert good is None and len(left) <= module.NUM_WORKERS, "what waited for a worker never had one"
    assert set(left) == {module.WorkerLost}, "what ran was killed before its time"


@pytest.mark.slow
def test_sizes_are_limited(limited: Grammars) -> None:
    def names(count: int) -> str:
        return json.dumps({"enum": [f"value {index}" for index in range(count)]})

    assert "more than grammars.max_text_bytes" in refusal("regex", "a" * 300_000)
    assert "more than grammars.max_compiled_bytes" in refusal("json_schema", names(5000), limited)
    poor = grammars(max_compile_bytes="1MiB")
    assert "memory" in refusal("json_schema", names(10_000), poor)
    poor.close()


def test_one_schema_is_compiled_once_for_all_who_want_it(jobs: list[type | None]) -> None:
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
