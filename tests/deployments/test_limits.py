"""What stands around the routes: sizes, numbers, keys, origins."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from loray.deployments.http_app import make_app
from loray.deployments.service import Service
from tests.deployments.scripted_backend import BASE, ScriptedBackend, run, saying, send, service_of
from tests.deployments.test_metrics import value

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
    assert (native.status_code, native.json()["error_type"]) == (413, "too_large")
    assert "100 bytes (limits.max_body_bytes)" in native.json()["error"]
    assert len(sent) < 10
    content = b" " * 5000 if has_length else chunks()
    compatible = send(service_of(saying("x"), **SMALL), "POST", "/v1/chat/completions", content=content)
    assert (compatible.status_code, compatible.json()["error"]["type"]) == (413, "invalid_request_error")


def test_a_body_within_the_limit_is_served() -> None:
    assert send(service_of(saying("x"), **SMALL), "POST", "/generate", json={"inputs": "hello"}).status_code == 200


def test_requests_beyond_the_limit_are_told_to_come_again_and_health_still_answers() -> None:
    backend = saying("hello world", turn_s=0.05)

    async def flood() -> list[httpx.Response]:
        async with client_of(service_of(backend, limits={"max_concurrent_requests": 2})) as client:
            body = {"inputs": "hi"}
            under_way = [asyncio.create_task(client.post("/generate", json=body)) for _ in range(2)]
            while len(backend.requests) < 2:
                await asyncio.sleep(0)
            refused = [
                await client.post("/generate", json=body),
                await client.post("/v1/completions", json={"model": BASE, "prompt": "hi"}),
            ]
            others = [await client.get("/health"), await client.get("/metrics")]
            return [*refused, *others, *await asyncio.gather(*under_way), await client.post("/generate", json=body)]

    native, compatible, *others = run(flood())
    assert (native.status_code, native.json()["error_type"], native.headers["retry-after"]) == (429, "overloaded", "1")
    assert (compatible.status_code, compatible.json()["error"]["code"]) == (429, "rate_limit_exceeded")
    assert [response.status_code for response in others] == [200] * 5


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


def test_without_origins_in_the_config_there_are_no_permissions() -> None:
    answer = send(service_of(saying("x")), "GET", "/info", headers={"Origin": "https://example.com"})
    assert "access-control-allow-origin" not in answer.headers


def test_a_bug_is_counted_as_a_failure_and_not_as_a_client_that_left() -> None:
    service = service_of(ScriptedBackend([KeyError("secret")]))
    send(service, "POST", "/generate", json={"inputs": "hello"})
    text = send(service, "GET", "/metrics").text
    assert value(text, 'loray_requests_total{route="/generate",status="500"}') == 1
    assert value(text, 'loray_failures_total{type="incomplete_generation"}') == 1


def test_the_errors_of_every_route_are_described() -> None:
    described = send(service_of(saying("x")), "GET", "/openapi.json").json()["paths"]
    expected = {"401", "403", "404", "405", "413", "422", "424", "429", "500", "503"}
    for path, methods in described.items():
        for method, operation in methods.items():
            assert expected <= operation["responses"].keys(), f"{method} {path}"
