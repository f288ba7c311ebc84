"""A process that compiles grammars, each in a child of its own: any may keep xgrammar busy for ever, fill the memory or crash it."""

import json
import os
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from loray.deployments.forked_work import ChildLost, ChildTooSlow, in_child
from loray.deployments.json_schema import enforceable
from loray.deployments.json_schema_patterns import Unenforceable, text_pattern
from loray.deployments.string_lengths import MARK, with_lengths
from loray.deployments.worker_process import Work, work_for_parent
from loray.models.grammar_vocabulary import grammar_vocabulary

ANY_OBJECT = '{"type": "object"}'
NO_MEMORY = "takes too much memory to compile"
LOST = "the grammar compiler did not survive it: it is nested too deep or takes too much memory"
NUM_TRIED = 4  # tokens


class Start(msgspec.Struct, frozen=True):
    model_folder: str
    trust_remote_code: bool


class Job(msgspec.Struct, frozen=True):
    kind: str  # as in grammars.GrammarSpec
    text: str
    limit_s: float


class Outcome(msgspec.Struct, frozen=True):
    rules: str = ""  # xgrammar's grammar as JSON, not compiled
    num_bytes: int = 0  # of memory, compiled
    refusal: str = ""
    is_too_slow: bool = False


def _prepare(start: bytes) -> Work:
    import xgrammar

    args = msgspec.msgpack.decode(start, type=Start)
    vocabulary = grammar_vocabulary(Path(args.model_folder), args.trust_remote_code)
    compiler = xgrammar.GrammarCompiler(vocabulary, max_threads=1, cache_enabled=False)
    warnings = os.memfd_create("warnings")
    os.dup2(warnings, 2)  # xgrammar says on stderr what it is going to ignore

    def compiled(job: Job) -> bytes:
        os.ftruncate(warnings, 0)
        os.lseek(warnings, 0, os.SEEK_SET)  # else the next warning would come after a hole of zeros
        outcome = _outcome(compiler, job)
        said = os.pread(warnings, 500, 0).decode(errors="replace")
        if outcome.rules and "Warning" in said:
            outcome = Outcome(refusal=_without_place(said))
        return msgspec.msgpack.encode(outcome)

    def work(message: bytes) -> bytes:
        job = msgspec.msgpack.decode(message, type=Job)
        try:
            return in_child(lambda: compiled(job), job.limit_s)
        except ChildTooSlow:
            return msgspec.msgpack.encode(Outcome(is_too_slow=True))
        except ChildLost:
            return msgspec.msgpack.encode(Outcome(refusal=LOST))

    return work


def _outcome(compiler: Any, job: Job) -> Outcome:
    try:
        grammar = _grammar(job)
        rules = grammar.serialize_json()
        compiled = compiler.compile_grammar(grammar)  # by the ranks anew, which must survive it
        _refuse_dead_ends(compiled)
        return Outcome(rules, compiled.memory_size_bytes)
    except Unenforceable as error:
        return Outcome(refusal=str(error))
    except json.JSONDecodeError as error:
        return Outcome(refusal=f"is not valid JSON: {error}")
    except RecursionError:
        return Outcome(refusal="is nested too deep")
    except MemoryError:
        return Outcome(refusal=NO_MEMORY)
    except Exception as error:  # xgrammar raises RuntimeError for most that it does not like, and more kinds
        is_full = "std::bad_alloc" in str(error)  # which some of its calls make an error of their own of
        return Outcome(refusal=NO_MEMORY if is_full else _without_place(str(error)))


def _grammar(job: Job) -> Any:
    from xgrammar import Grammar

    if job.kind == "json_object":
        return Grammar.from_json_schema(ANY_OBJECT, any_whitespace=False)
    if job.kind == "json_schema":
        schema = json.dumps(enforceable(json.loads(job.text)))
        return _with_lengths(Grammar.from_json_schema(schema, any_whitespace=False))
    if job.kind == "regex":
        return Grammar.from_regex(text_pattern(job.text))
    if job.kind == "ebnf":
        return Grammar.from_ebnf(job.text)
    assert job.kind == "structural_tag", job.kind
    return _with_lengths(Grammar.from_structural_tag(json.dumps(_checked_tags(json.loads(job.text)))))


def _with_lengths(grammar: Any) -> Any:
    text = str(grammar)
    return type(grammar).from_ebnf(with_lengths(text)) if MARK in text else grammar


def _refuse_dead_ends(compiled: Any) -> None:
    """Those that are met soon; a later one is met by the rank."""
    import xgrammar

    vocabulary = compiled.tokenizer_info
    matcher = xgrammar.GrammarMatcher(compiled)
    bits = xgrammar.allocate_token_bitmask(1, vocabulary.vocab_size)  # [1, words] int32
    for _ in range(NUM_TRIED):
        matcher.fill_next_token_bitmask(bits)
        allowed = np.unpackbits(bits.numpy().view(np.uint8), bitorder="little").nonzero()[0]
        if not len(allowed):
            raise Unenforceable("", "leads to where it allows none of the model's tokens")
        token_id = next((token_id for token_id in allowed.tolist() if token_id not in vocabulary.stop_token_ids), None)
        if token_id is None or not matcher.accept_token(token_id):
            return


def _checked_tags(value: Any) -> Any:
    """Of a structural tag: with every JSON schema in it checked, and spaces that come to an end."""
    if isinstance(value, list):
        return [_checked_tags(item) for item in value]
    if not isinstance(value, dict):
        return value
    if value.get("type") == "json_schema" and "json_schema" in value:
        others = {name: item for name, item in value.items() if name != "place"}
        return {"max_whitespace_cnt": 1, **others, "json_schema": _enforceable_at(value.get("place", ""), value["json_schema"])}
    return {name: _checked_tags(item) for name, item in value.items()}


def _enforceable_at(place: str, schema: Any) -> Any:
    """`place`: whose schema it is, of several."""
    try:
        return enforceable(schema)
    except Unenforceable as error:
        raise Unenforceable(place, str(error)) from error


def _without_place(message: str) -> str:
    """xgrammar's messages begin with a time and a line of its source."""
    line = message.strip().splitlines()[0] if message.strip() else "xgrammar refuses it without a word"
    for mark in ("Warning: ", "is false: ", ".cc:"):
        line = line.rpartition(mark)[2]
    return line.lstrip("0123456789: ")[:500]


if __name__ == "__main__":
    work_for_parent(_prepare)
