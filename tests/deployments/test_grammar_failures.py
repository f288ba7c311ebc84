"""A grammar that the ranks can't follow to its end is the caller's mistake, at every door; what the ranks can't do is the server's."""

import asyncio
import json
from typing import Any

import httpx
import pytest

from loray.deployments.config import ServerArgs
from loray.deployments.errors import InvalidRequest, from_wire
from loray.deployments.native import NativeApi
from loray.deployments.service import Service
from loray.deployments.tokenizer import Tokenizer
from tests.deployments.scripted_backend import BASE, HF, ScriptedBackend, send, tokens_of
from tests.deployments.tiny_grammars import shared_grammars
from tests.weather_tools import HELLO, WEATHER

pytestmark = pytest.mark.slow  # compiles grammars

REASON = "the grammar leads to where it allows none of the model's tokens"
WORD = {"type": "regex", "regex": "[a-z]+"}
NATIVE = {"inputs": "hello", "parameters": {"response_format": WORD}}
CHAT: dict[str, Any] = {"model": BASE, "messages": HELLO}
TOKENS = tokens_of("hello")
DOORS: list[tuple[str, dict[str, Any], str]] = [
    ("/generate", NATIVE, "response_format"),
    ("/generate_stream", NATIVE, "response_format"),
    ("/", NATIVE, "response_format"),
    ("/", {**NATIVE, "stream": True}, "response_format"),
    ("/v1/chat/completions", {**CHAT, "response_format": WORD}, "response_format"),
    ("/v1/chat/completions", {**CHAT, "response_format": WORD, "stream": True}, "response_format"),
    ("/v1/chat/completions", {**CHAT, "response_format": WORD, "n": 2}, "response_format"),
    ("/v1/chat/completions", {**CHAT, "tools": [WEATHER], "tool_choice": "required"}, "tools"),
    ("/v1/chat/completions", {**CHAT, "tools": [WEATHER], "stream": True}, "tools"),
]


def service_of(error: str, tokens: list[list[int]]) -> Service:
    """Its driver says this error after these tokens."""
    backend = ScriptedBackend([*tokens, from_wire(error, REASON)])
    service = Service(ServerArgs(), Tokenizer(HF), backend, 4096, {})
    service.grammars = shared_grammars()
    return service


def last_event(response: httpx.Response) -> Any:
    return json.loads(response.text.strip().split("\n\n")[-1].removeprefix("data: "))


def body_of(path: str, field: str) -> dict[str, Any]:
    message = f"{field}: {REASON}"
    if path.startswith("/v1/"):
        return {"error": {"message": message, "type": "invalid_request_error", "param": field, "code": None}}
    return {"error": message, "error_type": "validation"}


@pytest.mark.parametrize(("path", "body", "field"), DOORS)
def test_a_dead_end_before_anything_was_told_is_answered_as_a_mistake_in_the_field(path: str, body: dict[str, Any], field: str) -> None:
    response = send(service_of("GrammarFailed", []), "POST", path, json=body)
    assert response.status_code == (400 if path.startswith("/v1/") else 422)
    assert response.json() == body_of(path, field)


@pytest.mark.parametrize(("path", "body", "field"), DOORS)
def test_a_dead_end_among_the_tokens_is_told_as_the_same_mistake(path: str, body: dict[str, Any], field: str) -> None:
    response = send(service_of("GrammarFailed", TOKENS), "POST", path, json=body)
    if path == "/generate_stream" or body.get("stream"):
        assert response.status_code == 200
        assert last_event(response) == body_of(path, field)
    else:
        assert response.status_code == (400 if path.startswith("/v1/") else 422)
        assert response.json() == body_of(path, field)


@pytest.mark.parametrize("path", ["/generate", "/v1/chat/completions"])
def test_what_the_ranks_cannot_do_stays_the_servers_failure(path: str) -> None:
    body = NATIVE if path == "/generate" else {**CHAT, "response_format": WORD}
    assert send(service_of("Incomplete", TOKENS), "POST", path, json=body).status_code == 500


def test_the_handle_raises_the_callers_mistake() -> None:
    async def drain(api: NativeApi) -> None:
        async for _ in api.generate_stream(NATIVE):
            pass

    for call in (lambda api: api.generate(NATIVE), drain):
        with pytest.raises(InvalidRequest, match=f"^response_format: {REASON}$") as caught:
            asyncio.run(call(NativeApi(service_of("GrammarFailed", TOKENS))))
        assert caught.value.param == "response_format"


def test_the_request_is_counted_as_a_wrong_one() -> None:
    service = service_of("GrammarFailed", TOKENS)
    send(service, "POST", "/generate", json=NATIVE)
    assert 'loray_failures_total{type="validation"} 1.0' in send(service, "GET", "/metrics").text
