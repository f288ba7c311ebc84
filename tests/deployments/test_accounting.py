"""What is counted, and to whom, of requests that are refused, break off, or make several choices of one prompt."""

import logging
import socket
from collections.abc import AsyncGenerator
from typing import Any
from urllib.parse import urlsplit

import pytest

from loray.deployments import log_line
from loray.deployments.errors import AdapterFailed, DeadlineExceeded, Incomplete, InvalidRequest, LorayError, Overloaded
from loray.deployments.http_app import make_app
from loray.deployments.request import GenerationRequest, TokenEvent
from loray.deployments.service import Service
from tests.deployments.live_server import eventually, live
from tests.deployments.scripted_backend import BASE, HF, ScriptedBackend, saying, send, service_of
from tests.deployments.test_metrics import value

pytestmark = pytest.mark.slow  # waits

KEYS = {"api_keys": {"inference": {"team-a": "sesame"}}}
KEY = {"Authorization": "Bearer sesame"}
CHAT = {"model": BASE, "messages": [{"role": "user", "content": "hello"}]}
NUM_HELLO = len(HF.encode("hello"))
BASE_PROMPT_TOKENS = 'loray_prompt_tokens_total{adapter="base"}'
KEY_PROMPT_TOKENS = 'loray_key_tokens_total{key="team-a",kind="prompt"}'


class Acknowledged(ScriptedBackend):
    """A driver that says it has the request, as while it fetches an adapter, and then fails."""

    def __init__(self, error: Exception) -> None:
        super().__init__([])
        self.error = error

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[TokenEvent, None]:
        yield TokenEvent(request.request_id)
        raise self.error


def metrics_of(service: Service) -> str:
    return send(service, "GET", "/metrics", headers=KEY).text


@pytest.mark.parametrize("path", ["/generate", "/embed"])
@pytest.mark.parametrize(
    ("backend", "is_taken"),
    [
        (ScriptedBackend([Overloaded("full")]), False),
        (ScriptedBackend([AdapterFailed("corrupt")]), False),
        (Acknowledged(AdapterFailed("corrupt")), False),
        (Acknowledged(Overloaded("full")), False),
        (Acknowledged(InvalidRequest("too long")), False),
        (Acknowledged(Incomplete("lost")), True),
        (Acknowledged(DeadlineExceeded("its adapter was still being fetched")), True),  # nobody says what was done for it until then
        (ScriptedBackend([[5]], finish="length"), True),
    ],
)
def test_prompt_tokens_are_those_of_requests_that_a_driver_took(path: str, backend: ScriptedBackend, is_taken: bool) -> None:
    service = service_of(backend, **KEYS)
    send(service, "POST", path, json={"inputs": "hello"}, headers=KEY)
    send(service, "POST", path, json={"inputs": "hello", "parameters": {"adapter_id": "pirate"}}, headers=KEY)
    text = metrics_of(service)
    expected = NUM_HELLO if is_taken else 0
    assert value(text, BASE_PROMPT_TOKENS) == value(text, 'loray_prompt_tokens_total{adapter="adapter"}') == expected
    label = "pirate" if 'adapter="pirate"' in text else "other"
    assert value(text, f'loray_adapter_tokens_total{{adapter="{label}",kind="prompt"}}') == expected
    assert value(text, KEY_PROMPT_TOKENS) == 2 * expected


def test_a_prompt_is_counted_though_its_grammar_fails_among_the_tokens() -> None:
    service = service_of(ScriptedBackend([[5], InvalidRequest("leads nowhere")]), **KEYS)
    send(service, "POST", "/generate", json={"inputs": "hello"}, headers=KEY)
    assert value(metrics_of(service), BASE_PROMPT_TOKENS) == NUM_HELLO


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {**CHAT, "n": 3}),
        ("/v1/completions", {"model": BASE, "prompt": "hello", "n": 2, "best_of": 3}),
        ("/v1/completions", {"model": BASE, "prompt": ["hello", "hello"], "n": 2}),
        ("/v1/completions", {"model": BASE, "prompt": [[5, 6], [5, 6]], "n": 2}),
        ("/v1/completions", {"model": BASE, "prompt": ["hello", "hello"], "n": 2, "echo": True, "max_tokens": 0}),
        ("/v1/completions", {"model": BASE, "prompt": "hello", "echo": True, "max_tokens": 0, "logprobs": 1}),
        ("/v1/completions", {"model": BASE, "prompt": "hello", "echo": True, "max_tokens": 2}),
        ("/v1/embeddings", {"model": BASE, "input": ["hello", "hello"]}),
    ],
)
def test_a_key_pays_for_each_prompt_once_and_for_new_tokens_as_usage_says_it(
    caplog: pytest.LogCaptureFixture, path: str, body: dict[str, Any]
) -> None:
    service = service_of(saying(" world"), **KEYS)
    with caplog.at_level(logging.INFO, "ray.serve.loray"):
        usage = send(service, "POST", path, json=body, headers=KEY).json()["usage"]
    text = metrics_of(service)
    assert value(text, KEY_PROMPT_TOKENS) == usage["prompt_tokens"] > 0
    assert value(text, 'loray_key_tokens_total{key="team-a",kind="generated"}') == usage.get("completion_tokens", 0)
    assert f" tokens={usage.get('completion_tokens', 0)} " in caplog.text


def test_a_key_pays_once_for_the_prompt_of_the_native_best_of(caplog: pytest.LogCaptureFixture) -> None:
    service = service_of(saying(" world"), **KEYS)
    body = {"inputs": "hello", "parameters": {"best_of": 2, "do_sample": True}}
    with caplog.at_level(logging.INFO, "ray.serve.loray"):
        assert send(service, "POST", "/generate", json=body, headers=KEY).status_code == 200
    text = metrics_of(service)
    assert value(text, KEY_PROMPT_TOKENS) == NUM_HELLO
    assert value(text, BASE_PROMPT_TOKENS) == 2 * NUM_HELLO, "of each sequence"
    assert f" prompt_tokens={NUM_HELLO} " in caplog.text


@pytest.mark.parametrize("path", ["/generate", "/v1/completions"])
def test_a_client_that_leaves_while_its_body_is_on_the_way_has_made_no_mistake(caplog: pytest.LogCaptureFixture, path: str) -> None:
    service = service_of(saying("x"), **KEYS)
    head = (
        f"POST {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer sesame\r\nContent-Type: application/json\r\nContent-Length: 50\r\n\r\n"
    )
    with caplog.at_level(logging.INFO, "ray.serve.loray"), live(make_app(service)) as address:
        url = urlsplit(address)
        with socket.create_connection((url.hostname or "", url.port or 0)) as client:
            client.sendall(f'{head}{{"inputs":'.encode())
        assert eventually(lambda: f"route={path}" in caplog.text)
    text = metrics_of(service)
    assert value(text, f'loray_requests_total{{route="{path}",status="499"}}') == 1
    assert value(text, 'loray_key_requests_total{key="team-a",status="499"}') == 1
    assert "loray_failures_total{" not in text
    assert "status=499" in caplog.text and "error=" not in caplog.text


@pytest.mark.parametrize("begins", [True, False])
def test_a_bug_among_the_tokens_is_an_error_and_nobody_has_cancelled(begins: bool) -> None:
    service = service_of(ScriptedBackend([*[[5]] * begins, KeyError("secret")]))
    assert send(service, "POST", "/generate", json={"inputs": "hello"}).status_code == 500
    text = send(service, "GET", "/metrics").text
    assert value(text, 'loray_generations_total{adapter="base",outcome="error"}') == 1 and 'outcome="cancelled"' not in text


@pytest.mark.parametrize(("path", "body"), [("/embed", {"inputs": "hello"}), ("/v1/embeddings", {"model": BASE, "input": "hello"})])
def test_a_bug_in_an_embedding_is_a_failed_embedding_that_tells_nothing(
    caplog: pytest.LogCaptureFixture, path: str, body: dict[str, Any]
) -> None:
    service = service_of(ScriptedBackend([KeyError("secret")]))
    response = send(service, "POST", path, json=body)
    assert response.status_code == 500 and "internal error" in response.text and "secret" not in response.text
    if path == "/embed":
        assert response.json()["error_type"] == "embedding_failure"
    text = send(service, "GET", "/metrics").text
    assert value(text, 'loray_embeddings_total{adapter="base",outcome="error"}') == 1
    assert value(text, 'loray_failures_total{type="embedding_failure"}') == 1
    assert "KeyError: 'secret'" in caplog.text, "whoever runs the server can find it"


@pytest.mark.parametrize("error", [Overloaded("full"), AdapterFailed("corrupt")])
def test_what_never_left_the_queue_has_no_time_in_it(error: LorayError) -> None:
    service = service_of(ScriptedBackend([error]))
    send(service, "POST", "/generate", json={"inputs": "hello"})
    send(service, "POST", "/generate", json={"inputs": "hello", "parameters": {"adapter_id": "pirate"}})
    text = send(service, "GET", "/metrics").text
    assert "loray_queue_seconds_count" not in text and "loray_adapter_queue_seconds_count" not in text


def test_a_long_odd_value_is_cut_between_characters_and_stays_quoted() -> None:
    line = log_line.log_line("request", {"id": "\n" * 1000, "status": 200})
    assert line == 'request id="' + r"\n" * log_line.MAX_CHARS + '" status=200'
