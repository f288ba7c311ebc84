"""What stands around the routes: sizes, numbers, keys, origins."""

import asyncio
import threading
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from pydantic import ValidationError

from loray.deployments import native
from loray.deployments.error_shapes import MAX_ERRORS, MAX_NAME_CHARS
from loray.deployments.errors import InvalidRequest
from loray.deployments.http_app import make_app
from loray.deployments.native_request import Body, ClassifyBatchBody, GenerateBody, parse
from loray.deployments.prompt_texts import MAX_CHARS_A_TOKEN
from loray.deployments.service import Service
from loray.deployments.tokenizer import OFF_LOOP_CHARS, Tokenizer
from tests.deployments.live_server import live
from tests.deployments.scripted_backend import BASE, HF, MAX_TOTAL_TOKENS, ScriptedBackend, post, run, saying, send, service_of
from tests.deployments.test_metrics import value

pytestmark = pytest.mark.slow  # waits

SMALL = {"limits": {"max_body_bytes": 100}}
KEYS = {"api_keys": {"inference": {"team-a": "sesame", "team-b": "poppy"}, "admin": "root"}}


def client_of(service: Service) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(make_app(service)), base_url="http://loray")


@pytest.mark.parametrize("has_length", [True, False], ids=["announced", "in chunks"])
def test_a_body_that_is_too_large_is_refused_in_each_shape_and_not_read_to_its_end(has_length: bool) -> None:
    sent = []

    async def chunks() -> AsyncIterator[bytes]:
        for index in range(100):
            sent.append(index)
            yield b" " * 50

    content: Any = b" " * 5000 if has_length else chunks()
    native = send(service_of(saying("x"), **SMALL), "POST", "/generate", content=content)
    assert (native.status_code, native.json()["error_type"], native.headers["connection"]) == (413, "too_large", "close")
    assert "100 bytes (limits.max_body_bytes)" in native.json()["error"]
    assert len(sent) < 10
    content = b" " * 5000 if has_length else chunks()
    compatible = send(service_of(saying("x"), **SMALL), "POST", "/v1/chat/completions", content=content)
    assert send(service_of(saying("x"), **SMALL), "POST", "/", content=b" " * 5000).status_code == 413
    assert (compatible.status_code, compatible.json()["error"]["type"]) == (413, "invalid_request_error")


@pytest.mark.parametrize("path", ["/generate", "/v1/completions"])
def test_a_body_that_does_not_come_is_refused_and_leaves_its_place_to_others(path: str) -> None:
    async def half() -> AsyncIterator[bytes]:
        yield b'{"inputs": '
        await asyncio.Event().wait()

    async def scenario() -> list[httpx.Response]:
        limits = {"max_concurrent_requests": 1, "body_timeout_s": 0.02}
        async with client_of(service_of(saying("x"), limits=limits)) as client:
            return [await client.post(path, content=half()), await client.post("/generate", json={"inputs": "hello"})]

    refused, served = run(scenario())
    error = refused.json()["error"]
    reason = error["message"] if path.startswith("/v1") else error
    assert (refused.status_code, refused.headers["connection"], served.status_code) == (408, "close", 200)
    assert "the body was not whole after 0.02 s (limits.body_timeout_s" in reason


def test_a_stream_may_last_longer_than_its_body_may_take() -> None:
    backend = saying("ab", turn_s=0.4)
    app = make_app(service_of(backend, limits={"body_timeout_s": 0.5}))
    with live(app) as address, httpx.stream("POST", f"{address}/generate_stream", json={"inputs": "hi"}) as response:
        assert '"generated_text":"ab"' in response.read().decode()
    assert len(backend.script) * backend.turn_s > 2 * 0.5


@pytest.mark.parametrize("path", ["/generate", "/embed"])
def test_the_time_that_a_body_takes_is_taken_off_the_deadline(path: str) -> None:
    backend = ScriptedBackend([[1]], finish="length")
    upload_s = 0.05

    async def slow() -> AsyncIterator[bytes]:
        yield b'{"inputs": '
        await asyncio.sleep(upload_s)
        yield b'"hello"}'

    service = service_of(backend, limits={"request_timeout_s": 60})
    assert send(service, "POST", path, content=slow(), headers={"Content-Type": "application/json"}).status_code == 200
    assert backend.requests[-1].deadline_s <= 60 - upload_s


def test_a_deadline_that_is_shorter_counts_for_the_body_too() -> None:
    async def never() -> AsyncIterator[bytes]:
        await asyncio.Event().wait()
        yield b""

    service = service_of(saying("x"), limits={"request_timeout_s": 0.02})
    assert send(service, "POST", "/generate", content=never()).status_code == 408


def test_what_is_refused_before_it_is_routed_is_counted_by_its_route() -> None:
    service = service_of(saying("x"), limits={"max_body_bytes": 100}, **KEYS)
    send(service, "POST", "/generate", json={"inputs": "hello"})
    send(service, "POST", "/v1/completions", content=b" " * 200, headers={"Authorization": "Bearer sesame"})
    send(service, "GET", "/v1/models/org/poet")
    send(service, "GET", "/admin/adapters")
    send(service, "GET", "/secret")
    text = send(service, "GET", "/metrics", headers={"Authorization": "Bearer sesame"}).text
    assert value(text, 'loray_requests_total{route="/generate",status="401"}') == 1
    assert value(text, 'loray_requests_total{route="/v1/completions",status="413"}') == 1
    assert value(text, 'loray_requests_total{route="/v1/models/{model_id:path}",status="401"}') == 1
    assert value(text, 'loray_requests_total{route="/admin/adapters",status="401"}') == 1
    assert value(text, 'loray_requests_total{route="unknown",status="401"}') == 1


def test_a_body_within_the_limit_is_served() -> None:
    assert send(service_of(saying("x"), **SMALL), "POST", "/generate", json={"inputs": "hello"}).status_code == 200


def test_requests_beyond_the_limit_are_told_to_come_again_and_health_and_admins_still_get_answers() -> None:
    backend = saying("hello world", turn_s=0.05)

    async def flood() -> list[httpx.Response]:
        async with client_of(service_of(backend, limits={"max_concurrent_requests": 2}, api_keys={"admin": "root"})) as client:
            body = {"inputs": "hi"}
            under_way = [asyncio.create_task(client.post("/generate", json=body)) for _ in range(2)]
            while len(backend.requests) < 2:
                await asyncio.sleep(0)
            refused = [
                await client.post("/generate", json=body),
                await client.post("/v1/completions", json={"model": BASE, "prompt": "hi"}),
                await client.post("/", json=body),
            ]
            admin = {"Authorization": "Bearer root"}  # may end what fills the server
            others = [await client.get("/health"), await client.get("/metrics"), await client.get("/admin/adapters", headers=admin)]
            return [*refused, *others, *await asyncio.gather(*under_way), await client.post("/generate", json=body)]

    native, compatible, at_the_root, *others = run(flood())
    assert (native.status_code, native.json()["error_type"], native.headers["retry-after"]) == (429, "overloaded", "1")
    assert (compatible.status_code, compatible.json()["error"]["code"]) == (429, "rate_limit_exceeded")
    assert at_the_root.status_code == 429
    assert [response.status_code for response in others] == [200] * 6


@pytest.mark.parametrize(("key", "status"), [("sesame", 200), ("poppy", 200), ("root", 401), ("sesam", 401), ("team-a", 401)])
def test_each_of_several_keys_opens_and_no_other(key: str, status: int) -> None:
    service = service_of(saying("x"), **KEYS)
    response = send(service, "POST", "/generate", json={"inputs": "hello"}, headers={"Authorization": f"Bearer {key}"})
    assert response.status_code == status


def test_requests_and_tokens_are_counted_by_the_names_of_the_keys() -> None:
    service = service_of(saying(" world"), **KEYS)
    for key in ["sesame", "sesame", "poppy", "wrong"]:
        send(service, "POST", "/generate", json={"inputs": "hello"}, headers={"Authorization": f"Bearer {key}"})
    text = send(service, "GET", "/metrics", headers={"Authorization": "Bearer poppy"}).text
    assert value(text, 'loray_key_requests_total{key="team-a",status="200"}') == 2
    assert value(text, 'loray_key_tokens_total{key="team-b",kind="generated"}') == 2
    assert value(text, 'loray_failures_total{type="unauthorized"}') == 1
    assert "sesame" not in text and "poppy" not in text


def test_a_page_of_an_allowed_origin_may_ask_and_read() -> None:
    service = service_of(saying("x"), cors={"allow_origins": ["https://example.com"]}, **KEYS)
    preflight = {
        "Origin": "https://example.com",
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization",
    }
    permission = send(service, "OPTIONS", "/v1/chat/completions", headers=preflight)
    assert (permission.status_code, permission.headers["access-control-allow-origin"]) == (200, "https://example.com")
    answer = send(service, "GET", "/v1/models", headers={"Origin": "https://example.com", "Authorization": "Bearer sesame"})
    assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, "https://example.com")
    assert send(service, "OPTIONS", "/generate", headers={**preflight, "Origin": "https://evil.example"}).status_code == 400


@pytest.mark.parametrize("may", [True, False])
def test_credentials_are_allowed_to_pages_where_the_config_says_so(may: bool) -> None:
    cors = {"allow_origins": ["https://example.com"], "allow_credentials": may}
    answer = send(service_of(saying("x"), cors=cors), "GET", "/info", headers={"Origin": "https://example.com"})
    assert (answer.headers.get("access-control-allow-credentials") == "true") is may


def test_a_page_may_read_that_there_was_a_bug() -> None:
    service = service_of(ScriptedBackend([KeyError("secret")]), cors={"allow_origins": ["https://example.com"]})
    answer = send(service, "POST", "/generate", json={"inputs": "hello"}, headers={"Origin": "https://example.com"})
    assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (500, "https://example.com")


def test_without_origins_in_the_config_there_are_no_permissions() -> None:
    answer = send(service_of(saying("x")), "GET", "/info", headers={"Origin": "https://example.com"})
    assert "access-control-allow-origin" not in answer.headers


def test_a_bug_is_counted_as_a_failure_and_not_as_a_client_that_left() -> None:
    service = service_of(ScriptedBackend([KeyError("secret")]))
    send(service, "POST", "/generate", json={"inputs": "hello"})
    text = send(service, "GET", "/metrics").text
    assert value(text, 'loray_requests_total{route="/generate",status="500"}') == 1
    assert value(text, 'loray_failures_total{type="incomplete_generation"}') == 1


def test_what_is_not_there_is_counted_as_a_failure() -> None:
    service = service_of(saying("x"))
    send(service, "GET", "/nope")
    send(service, "GET", "/generate")
    text = send(service, "GET", "/metrics").text
    assert value(text, 'loray_failures_total{type="not_found"}') == 1
    assert value(text, 'loray_failures_total{type="method_not_allowed"}') == 1


MANY = 5000
MISTAKES = {
    "texts": (ClassifyBatchBody, {"inputs": [1] * MANY}),
    "names": (GenerateBody, {"inputs": "x", **{f"unknown{i}": i for i in range(MANY)}}),
    "deeper names": (GenerateBody, {"inputs": "x", "parameters": {f"unknown{i}": i for i in range(MANY)}}),
    "stops": (GenerateBody, {"inputs": "x", "parameters": {"stop": [1] * MANY}}),
    "merge": (GenerateBody, {"inputs": "x", "parameters": {"merged_adapters": {"ids": [1] * MANY, "weights": ["1"] * MANY}}}),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_a_body_of_mistakes_makes_few_errors(case: str) -> None:
    kind, body = MISTAKES[case]
    with pytest.raises(ValidationError) as mistakes:
        kind.model_validate(body)
    assert mistakes.value.error_count() <= MAX_ERRORS


def test_unknown_names_are_told_though_there_are_many_and_long_ones_are_cut() -> None:
    body = {"inputs": 5, **{f"unknown{i}" + "o" * 500: i for i in range(MANY)}, "stream": 7}
    with pytest.raises(InvalidRequest) as refused:
        parse(GenerateBody, body)
    assert "inputs: " in refused.value.message and "stream: " in refused.value.message and "unknown0o" in refused.value.message
    assert len(refused.value.message) < 2 * MAX_ERRORS * MAX_NAME_CHARS
    response = post(saying("x"), "/generate", body)
    assert response.status_code == 422 and response.json()["error"] == refused.value.message


def test_no_more_errors_are_told_than_can_be_read() -> None:
    class Wide(Body):
        numbers: list[int]

    with pytest.raises(InvalidRequest) as refused:
        parse(Wide, {"numbers": ["one"] * MANY})
    assert refused.value.message.count("numbers.") == MAX_ERRORS


def test_a_text_that_no_prompt_could_be_is_not_tokenized() -> None:
    most = MAX_CHARS_A_TOKEN * MAX_TOTAL_TOKENS
    assert post(saying("x"), "/tokenize", {"inputs": "a" * most}).status_code == 200
    refused = post(saying("x"), "/tokenize", {"inputs": "a" * (most + 1)})
    assert (refused.status_code, refused.json()["error_type"]) == (422, "validation")
    assert f"inputs: has {most + 1} characters, more than the {most}" in refused.json()["error"]


def test_the_tokens_of_a_long_text_are_written_off_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = []

    class Noted(native.JSONResponse):
        def render(self, content: Any) -> bytes:
            threads.append(threading.current_thread())
            return super().render(content)

    class Spans(Tokenizer):
        def _encodings(self, *args: Any) -> Any:
            threads.append(threading.current_thread())
            return super()._encodings(*args)

    monkeypatch.setattr(native, "JSONResponse", Noted)
    service = service_of(saying("x"))
    service.tokenizer, service.max_total_tokens = Spans(HF), OFF_LOOP_CHARS
    assert len(send(service, "POST", "/tokenize", json={"inputs": "hello " * OFF_LOOP_CHARS}).json()) > 1
    assert len(threads) == 2 and threading.current_thread() not in threads


@pytest.mark.parametrize("scheme", ["bearer", "BEARER", "Bearer "])
def test_the_scheme_of_a_key_may_be_written_in_any_case(scheme: str) -> None:
    service = service_of(saying("x"), **KEYS)
    assert send(service, "GET", "/info", headers={"Authorization": f"{scheme} sesame"}).status_code == 200
    assert send(service, "GET", "/info", headers={"Authorization": f"{scheme} sesam"}).status_code == 401
    assert send(service, "GET", "/info", headers={"Authorization": "Basic sesame"}).status_code == 401


@pytest.mark.parametrize("path", ["/", "/health", "/ping"])
def test_health_checks_without_a_body_need_no_key_either(path: str) -> None:
    service = service_of(saying("x"), **KEYS)
    assert send(service, "HEAD", path).status_code == send(service, "GET", path).status_code == 200
    assert send(service, "HEAD", "/info").status_code == 401


def test_info_tells_the_limit_that_holds() -> None:
    service = service_of(saying("x"), limits={"max_concurrent_requests": 3})
    assert send(service, "GET", "/info").json()["max_concurrent_requests"] == 3
