"""One line for each request, its id everywhere, and the spans made of its times."""

import logging
import sys
from typing import Any

import httpx
import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from loray.deployments import http_app, trace_context, tracing
from loray.deployments.config import TracingArgs
from loray.deployments.errors import Overloaded
from loray.deployments.trace_context import TraceContext
from loray.deployments.tracing import Tracing, otlp_exporter
from tests.deployments.scripted_backend import BASE, ScriptedBackend, run, saying, send, service_of

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.mark.parametrize("path", ["/generate", "/generate_stream", "/nope", "/health"])
def test_an_answer_has_the_id_that_the_caller_gave(path: str) -> None:
    response = send(service_of(saying("x")), "POST", path, json={"inputs": "hi"}, headers={"X-Request-Id": "call-7"})
    assert response.headers.get_list("x-request-id") == ["call-7"]


@pytest.mark.parametrize("headers", [{}, {"X-Request-Id": ""}])
def test_an_id_is_made_where_there_is_none(headers: dict[str, str]) -> None:
    made = [send(service_of(saying("x")), "GET", "/info", headers=headers).headers["x-request-id"] for _ in range(2)]
    assert len(set(made)) == 2 and all(len(one) == 32 for one in made)


@pytest.mark.parametrize(
    ("sent", "told", "begins"),
    [
        (b"two words", 'id="two words"', "two%20words-"),
        (b'"odd" id=x', r'id="\"odd\" id=x"', '"odd"%20id=x-'),
        (b"gr\xc3\xbc\xdf", r'id="gr\u00c3\u00bc\u00df"', "gr%C3%BC%DF-"),
        (b"x" * 129, f'id="{"x" * 129}"', "x" * 128 + "-"),
    ],
    ids=["words", "quotes", "bytes", "long"],
)
def test_an_odd_id_comes_back_as_it_was_sent_and_both_logs_have_it(
    caplog: pytest.LogCaptureFixture, sent: bytes, told: str, begins: str
) -> None:
    backend = saying("x")
    with caplog.at_level(logging.INFO, "ray.serve.loray"):
        response = send(service_of(backend), "POST", "/generate", json={"inputs": "hi"}, headers={"X-Request-Id": sent})
    assert [value for name, value in response.headers.raw if name.lower() == b"x-request-id"] == [sent]
    assert f"request {told} route=/generate" in caplog.text
    assert backend.requests[-1].request_id.startswith(begins)


def test_a_bug_and_a_refusal_have_the_id_too() -> None:
    for backend, status in [(ScriptedBackend([KeyError("x")]), 500), (ScriptedBackend([Overloaded("full")]), 429)]:
        response = send(service_of(backend), "POST", "/generate", json={"inputs": "hi"}, headers={"X-Request-Id": "call-8"})
        assert (response.status_code, response.headers["x-request-id"]) == (status, "call-8")


def test_the_id_is_left_to_the_proxy_where_there_is_one() -> None:
    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(http_app.make_app(service_of(saying("x")), answers_request_id=False))
        async with httpx.AsyncClient(transport=transport, base_url="http://loray") as client:
            return await client.get("/info", headers={"X-Request-Id": "call-9"})

    assert "x-request-id" not in run(ask()).headers


def test_what_reaches_the_driver_begins_with_the_id_and_is_unique() -> None:
    backend = saying("x")
    for _ in range(2):
        send(service_of(backend), "POST", "/generate", json={"inputs": "hi"}, headers={"X-Request-Id": "call-7"})
    ids = [request.request_id for request in backend.requests]
    assert all(one.startswith("call-7-") for one in ids) and len(set(ids)) == 2


def test_a_request_is_one_line_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    service = service_of(saying(" world"), api_keys={"inference": {"team-a": "sesame"}})
    body = {"inputs": "hello", "parameters": {"adapter_id": 'odd "name"\nid=forged'}}
    headers = {"X-Request-Id": "call-7", "Authorization": "Bearer sesame", "traceparent": PARENT}
    with caplog.at_level(logging.INFO, "ray.serve.loray"):
        send(service, "POST", "/generate", json=body, headers=headers)
        send(service, "GET", "/health")
    (line,) = [record.getMessage() for record in caplog.records if record.name == "ray.serve.loray"]
    assert line.startswith("request id=call-7 route=/generate status=200 ms=")
    for part in ["key=team-a", "tokens=2", "outcome=eos_token", "trace=0af7651916cd43dd8448eb211c80319c", "first_token_ms=", "adapter="]:
        assert f" {part}" in line
    assert "\n" not in line and "sesame" not in line and " id=forged" not in line


def test_a_refusal_is_a_line_with_its_type(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "ray.serve.loray"):
        send(service_of(saying("x")), "POST", "/generate", json={})
    assert "status=422" in caplog.text and "error=validation" in caplog.text


@pytest.mark.parametrize(
    ("sent", "handed_on"),
    [
        ([PARENT], PARENT),
        (["cc" + PARENT[2:]], PARENT),
        (["cc" + PARENT[2:] + "-what-a-later-version-says"], PARENT),
        ([PARENT + "-more"], ""),
        ([PARENT, PARENT], ""),
        ([PARENT.upper()], ""),
        (["00-" + "0" * 32 + "-b7ad6b7169203331-01"], ""),
        (["00-0af7651916cd43dd8448eb211c80319c-" + "0" * 16 + "-01"], ""),
        (["ff" + PARENT[2:]], ""),
        (["x"], ""),
        ([], ""),
    ],
)
def test_a_traceparent_is_as_w3c_wants_it_or_left_out_and_its_state_with_it(sent: list[str], handed_on: str) -> None:
    backend = saying("x")
    headers = [*(("traceparent", one) for one in sent), ("tracestate", "congo=t61"), ("tracestate", "rojo=00f067 ")]
    send(service_of(backend), "POST", "/generate", json={"inputs": "hi"}, headers=headers)
    assert backend.requests[-1].trace == (TraceContext(handed_on, "congo=t61,rojo=00f067 ") if handed_on else TraceContext())


@pytest.mark.parametrize("state", ["a=" + "x" * 4096, "a=ü"])
def test_a_tracestate_that_nobody_needs_to_pass_on_is_left_out(state: str) -> None:
    assert trace_context.received([PARENT], [state]) == TraceContext(PARENT)


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("POST", "/generate_stream", {"inputs": "hi"}),
        ("POST", "/embed", {"inputs": "hi"}),
        ("POST", "/v1/completions", {"model": BASE, "prompt": "hi", "n": 2}),
        ("POST", "/v1/chat/completions", {"model": BASE, "messages": [{"role": "user", "content": "hi"}], "stream": True}),
        ("GET", "/startup", None),
    ],
)
def test_every_route_hands_the_callers_trace_on(method: str, path: str, body: Any) -> None:
    backend = saying("x")
    response = send(service_of(backend), method, path, json=body, headers={"traceparent": PARENT, "tracestate": "congo=t61"})
    assert response.status_code == 200 and "traceparent" not in response.headers
    assert {request.trace for request in backend.requests} == {TraceContext(PARENT, "congo=t61")}


def test_spans_tell_queue_prefill_and_decode_under_the_callers_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    exporter = InMemorySpanExporter()
    traces = Tracing(exporter, TracingArgs())
    monkeypatch.setattr(http_app, "make_tracing", lambda args: traces)
    backend = saying("hello world", turn_s=0.01)
    send(service_of(backend), "POST", "/generate", json={"inputs": "hi"}, headers={"traceparent": PARENT})
    traces.close()
    *parts, request = sorted(exporter.get_finished_spans(), key=lambda span: span.end_time - span.start_time)
    assert request.name == "/generate" and request.attributes["http.response.status_code"] == 200
    assert f"{request.context.trace_id:032x}" == PARENT.split("-")[1] and f"{request.parent.span_id:016x}" == PARENT.split("-")[2]
    assert backend.requests[-1].trace == TraceContext(f"{PARENT[:36]}{request.context.span_id:016x}-01")
    assert {span.name for span in parts} == {"queue", "prefill", "decode"}
    for span in parts:
        assert span.parent.span_id == request.context.span_id
        assert request.start_time <= span.start_time <= span.end_time <= request.end_time


def spans_of(monkeypatch: pytest.MonkeyPatch, *requests: tuple[str, str]) -> list[Any]:
    exporter = InMemorySpanExporter()
    traces = Tracing(exporter, TracingArgs())
    monkeypatch.setattr(http_app, "make_tracing", lambda args: traces)
    for method, path in requests:
        send(service_of(saying("x")), method, path)
    traces.close()
    return list(exporter.get_finished_spans())


def test_a_refusal_is_an_error_in_its_span(monkeypatch: pytest.MonkeyPatch) -> None:
    refused, served = spans_of(monkeypatch, ("POST", "/generate"), ("GET", "/info"))
    assert (refused.name, refused.attributes["error.type"]) == ("/generate", "validation")
    assert "error.type" not in served.attributes


def test_probes_are_not_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    probes = [("GET", "/health"), ("HEAD", "/ping"), ("GET", "/"), ("GET", "/metrics"), ("POST", "/")]
    assert [span.name for span in spans_of(monkeypatch, *probes)] == ["/"]


def test_a_bug_is_told_on_a_line_that_nobody_else_can_write(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(ScriptedBackend):
        async def adapters(self) -> list[str]:
            raise KeyError("secret")

    send(service_of(Broken([])), "GET", "/v1/models/x%0Dforged", headers={"X-Request-Id": "call-7"})
    (line,) = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    assert line == r'failed id=call-7 method=GET path="/v1/models/x\rforged"'


def test_the_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(ImportError, match=r"loray\[otel\]"):
        otlp_exporter(TracingArgs(otlp_endpoint="http://localhost:4318/v1/traces"))


def test_without_configuration_nothing_is_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing.Tracing, "__init__", lambda *args: pytest.fail("must not be made"))
    assert send(service_of(saying("x")), "POST", "/generate", json={"inputs": "hi"}).status_code == 200
