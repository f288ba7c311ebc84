"""response_format at the native doors: which texts the grammar lets pass that reaches the model, and what is refused."""

import json
import re
from typing import Any

import pytest

from loray.deployments.service import Service
from tests.deployments.scripted_backend import ScriptedBackend, saying, send, service_of
from tests.deployments.tiny_grammars import random_text, shared_grammars

NAMED = {"type": "object", "properties": {"name": {"enum": ["Ann", "Bö"]}}, "required": ["name"], "additionalProperties": False}


def service(backend: ScriptedBackend) -> Service:
    service = service_of(backend)
    service.grammars = shared_grammars()
    return service


def text_of(wanted: dict[str, Any], door: str = "/generate") -> str:
    """That a model which knows nothing would write."""
    backend = saying("x")
    body = {"inputs": "hello", "parameters": {"response_format": wanted}}
    response = send(service(backend), "POST", door, json=body)
    assert response.status_code == 200, response.text
    texts = (random_text(backend.requests[0].sampling.grammar, seed) for seed in range(20))
    return next(text for text in texts if text is not None)


@pytest.mark.parametrize("door", ["/generate", "/generate_stream"])
@pytest.mark.parametrize("kind", ["json_object", "json_schema"])
def test_a_schema_binds_the_text(door: str, kind: str) -> None:
    assert json.loads(text_of({"type": kind, "schema": NAMED}, door))["name"] in ("Ann", "Bö")


def test_the_schema_of_a_json_object_need_not_be_one_of_objects() -> None:
    assert json.loads(text_of({"type": "json_object", "schema": {"type": "string", "enum": ["yes"]}})) == "yes"


@pytest.mark.parametrize("schema", [{}, {"schema": None}, {"schema": {}}])
def test_without_a_schema_any_object_will_do(schema: dict[str, Any]) -> None:
    assert isinstance(json.loads(text_of({"type": "json_object", **schema})), dict)


def test_a_regular_expression_binds_the_text() -> None:
    assert re.fullmatch(r"[0-9]{3}-(a|b)", text_of({"type": "regex", "regex": r"[0-9]{3}-(a|b)"}))


def test_a_grammar_binds_the_text() -> None:
    assert text_of({"type": "ebnf", "grammar": 'root ::= "yes" | "no"'}) in ("yes", "no")


@pytest.mark.parametrize("parameters", [{}, {"response_format": None}, {"response_format": {"type": "text", "schema": None}}])
def test_any_text_needs_no_grammar(parameters: dict[str, Any]) -> None:
    backend = saying("x")
    assert send(service(backend), "POST", "/generate", json={"inputs": "hello", "parameters": parameters}).status_code == 200
    assert backend.requests[0].sampling.grammar == b""


@pytest.mark.parametrize("door", ["/generate", "/generate_stream"])
@pytest.mark.parametrize(
    "wanted",
    [
        {"type": "json_schema", "schema": {"type": "strin"}},
        {"type": "regex", "regex": "(a"},
        {"type": "ebnf", "grammar": "root ::= missing"},
    ],
)
def test_what_no_grammar_can_be_made_of_is_refused_by_name(wanted: dict[str, Any], door: str) -> None:
    backend = saying("x")
    response = send(service(backend), "POST", door, json={"inputs": "hello", "parameters": {"response_format": wanted}})
    assert (response.status_code, response.json()["error_type"], backend.requests) == (422, "validation", [])
    assert response.json()["error"].startswith("response_format: ")
