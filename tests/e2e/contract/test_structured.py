"""Answers in a form, from a random model at temperature 1: each is valid, and no schema, good or bad, disturbs anybody else."""

import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import jsonschema  # type: ignore[import-untyped]
import pytest

from tests.deployments.varied_schemas import ENFORCEABLE, closed
from tests.e2e.conftest import App
from tests.e2e.oracle import Oracle
from tests.e2e.patience import PATIENCE_S

pytestmark = pytest.mark.slow

PROMPT = "hello world, this is"
AT_ONCE = 16
MAX_TOKENS = 1000
QUICK = 16  # schemas in `make test`
# Choosing so many of so many names takes xgrammar minutes.
EXPLOSIVE = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(1000)}, "minProperties": 300, "maxProperties": 600}
# Quickly compiled, but with every token there are more ways to read what was written.
AMBIGUOUS = 'root ::= x x x x x x x x "the end"\nx ::= [^b]* | x [^c]* x | x x [^d]* x x'
Answer = tuple[str, str]  # text, and why it ended


def whole(app: App, schema: Any, seed: int, adapter_id: str) -> Answer:
    body = native_body(schema, seed, adapter_id)
    response = app.post("/generate", body)
    assert response.status_code == 200, f"{schema}: {response.text}"
    return response.json()["generated_text"], response.json()["details"]["finish_reason"]


def streamed(app: App, schema: Any, seed: int, adapter_id: str) -> Answer:
    response = app.post("/generate_stream", native_body(schema, seed, adapter_id))
    assert response.status_code == 200, f"{schema}: {response.text}"
    events = [json.loads(line.removeprefix("data:")) for line in response.text.splitlines() if line.startswith("data:")]
    assert all(len(event["token"]["alternative_tokens"]) == 2 for event in events)
    return events[-1]["generated_text"], events[-1]["details"]["finish_reason"]


def native_body(schema: Any, seed: int, adapter_id: str) -> dict[str, Any]:
    parameters = {"do_sample": True, "seed": seed, "max_new_tokens": MAX_TOKENS, "adapter_id": adapter_id, "details": True}
    return {"inputs": PROMPT, "parameters": {**parameters, "return_k_alternatives": 2, "response_format": of(schema)}}


def of(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "schema": schema}


def ask(app: App, schema: Any, seed: int) -> Answer:
    """Base and adapters, whole and streamed, in turn. A schema that is no object stands in one."""
    schema = schema if isinstance(schema, dict) else {"allOf": [schema]}
    return (whole, streamed)[seed % 2](app, schema, seed, ("", "a4", "a8")[seed % 3])


def check_valid(app: App, schemas: Sequence[Any]) -> int:
    """How many came to an end by themselves; those are valid."""
    with ThreadPoolExecutor(AT_ONCE) as clients:
        answers = clients.map(lambda seed: ask(app, schemas[seed], seed), range(len(schemas)))
    num_ended = 0
    for schema, (text, reason) in zip(schemas, answers, strict=True):
        if reason == "eos_token":
            num_ended += 1
            jsonschema.validate(json.loads(text), schema, jsonschema.Draft202012Validator)
    return num_ended


def test_answers_in_many_forms_at_once_are_valid(app: App) -> None:
    schemas = ENFORCEABLE[-3::-7][:QUICK]
    assert check_valid(app, schemas) >= 0.8 * len(schemas)
    app.wait_until_idle()


@pytest.mark.soak
def test_answers_in_every_form_are_valid(app: App) -> None:
    assert len(ENFORCEABLE) >= 100
    assert check_valid(app, ENFORCEABLE * 3) >= 0.8 * 3 * len(ENFORCEABLE)
    app.wait_until_idle()


def test_good_bad_and_explosive_forms_disturb_no_plain_stream(app: App, oracle: Oracle) -> None:
    """All of them new to the server, so that they are compiled while the streams run."""
    forms = [closed(**{f"field{i}": {"type": "integer", "minimum": i, "maximum": 10 * i}}) for i in range(1, AT_ONCE + 1)]
    plain = {"inputs": PROMPT, "parameters": {"max_new_tokens": 600, "ignore_eos_token": True, "details": True}}
    ambiguous = {"inputs": PROMPT, "parameters": {"do_sample": True, "response_format": {"type": "ebnf", "grammar": AMBIGUOUS}}}
    with ThreadPoolExecutor(2 * AT_ONCE) as clients:
        beside = {name: clients.submit(app.post, "/generate", with_adapter(plain, name)) for name in ("", "a4", "a8")}
        slow = clients.submit(app.post, "/generate", ambiguous)
        exploding = clients.submit(app.post, "/generate", native_body(EXPLOSIVE, 0, ""))
        bad = [clients.submit(app.post, path, native_body({"type": "strin"}, 0, "a4")) for path in ("/generate", "/generate_stream")]
        num_ended = clients.submit(check_valid, app, forms)
    assert num_ended.result() == AT_ONCE
    for refused, word in [(exploding, "compile"), *((one, "type") for one in bad)]:
        assert refused.result().status_code == 422 and refused.result().json()["error_type"] == "validation"
        assert refused.result().json()["error"].startswith("response_format") and word in refused.result().json()["error"]
    assert slow.result().json()["error_type"] == "validation" and "takes too long" in slow.result().json()["error"]
    for name, answer in beside.items():
        output_ids = [token["id"] for token in answer.result().json()["details"]["tokens"]]
        oracle.assert_greedy(name, oracle.tokenizer(PROMPT)["input_ids"], output_ids)
    app.wait_until_idle()


def with_adapter(body: dict[str, Any], adapter_id: str) -> dict[str, Any]:
    return {**body, "parameters": {**body["parameters"], "adapter_id": adapter_id}}


def test_a_client_that_leaves_an_answer_in_a_form_leaves_nothing_behind(app: App) -> None:
    endless = {"type": "array", "items": {"type": "integer"}, "minItems": 1000}
    before = app.wait_until_idle()["generated_tokens_total"]
    with httpx.stream("POST", app.url + "/generate_stream", json=native_body(endless, 1, "a4"), timeout=PATIENCE_S) as response:
        assert next(response.iter_lines()).startswith("data:")
    assert app.wait_until_idle()["generated_tokens_total"] - before < MAX_TOKENS
