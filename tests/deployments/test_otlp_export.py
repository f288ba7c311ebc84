"""Spans on their way to a collector, by the real exporter over a real socket: who is under whom, and what they say."""

import socket
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from loray.deployments.config import TracingArgs
from loray.deployments.http_app import make_app
from loray.deployments.native import NativeApi
from loray.deployments.tracing import Tracing, make_tracing
from tests.deployments.live_server import live
from tests.deployments.local_driver import LocalBackend, driver_over
from tests.deployments.rank_in_process import RankInProcess, start_engine
from tests.deployments.scripted_backend import run, saying, service_of
from tests.otlp_collector import Collector, collecting

pytestmark = pytest.mark.slow  # a server of its own

TRACE, CALLER = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
HEADERS = {"traceparent": f"00-{TRACE}-{CALLER}-01", "tracestate": "congo=t61rcWkgMzE,rojo=00f067", "X-Request-Id": "call-7"}
BODY = {"inputs": "hi", "parameters": {"max_new_tokens": 3, "details": True}}


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")  # milliseconds; users leave it at 5000
    with collecting() as collector:
        yield collector


def tracing_to(collector: Collector, **args: Any) -> Tracing:
    tracing = make_tracing(TracingArgs(otlp_endpoint=collector.endpoint, **args))
    assert tracing
    return tracing


def ask(collector: Collector, *requests: dict[str, str], sample_ratio: float = 1.0) -> list[httpx.Response]:
    """Of a server over a driver over a simulated rank, both of which export: /generate with each of these headers."""
    tracing = {"otlp_endpoint": collector.endpoint, "sample_ratio": sample_ratio}
    driver_tracing = tracing_to(collector, sample_ratio=sample_ratio)
    backend: Any = LocalBackend(lambda: driver_over(start_engine(RankInProcess()), tracing=driver_tracing))
    with live(make_app(service_of(backend, tracing=tracing))) as url:
        return [httpx.post(f"{url}/generate", json=BODY, headers=headers, timeout=30) for headers in requests]


def test_a_trace_goes_from_the_caller_over_ingress_to_the_driver(collector: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-tenant=poets")
    (response,) = ask(collector, HEADERS)
    assert response.status_code == 200
    spans = collector.spans(TRACE, 5)
    ingress, driver = spans["/generate"], spans["generate"]
    assert (ingress.parent_id, driver.parent_id) == (CALLER, ingress.span_id)
    assert {spans[name].parent_id for name in ("queue", "prefill", "decode")} == {ingress.span_id}
    assert {(span.service, span.tracestate) for span in spans.values()} == {("loray", HEADERS["tracestate"])}
    assert {headers.get("x-tenant") for headers in collector.headers} == {"poets"}
    assert (ingress.attributes["loray.request_id"], ingress.attributes["http.response.status_code"]) == ("call-7", 200)
    said = driver.attributes
    assert said["loray.request_id"].startswith("call-7-") and (said["loray.adapter_id"], said["loray.outcome"]) == ("", "length")
    assert (said["gen_ai.usage.input_tokens"], said["gen_ai.usage.output_tokens"]) == (response.json()["details"]["prompt_tokens"], 3)
    assert 0 < said["loray.queue_time"] <= said["loray.time_to_first_token"] <= (driver.end_ns - driver.start_ns) / 1e9


@pytest.mark.parametrize("traceparent", ["", "00-xyz", f"00-{TRACE}-{'0' * 16}-01", f"00-{TRACE}-{CALLER}-01-more"])
def test_what_is_no_traceparent_begins_a_new_trace(collector: Collector, traceparent: str) -> None:
    ask(collector, {**HEADERS, "traceparent": traceparent}, HEADERS)
    collector.spans(TRACE, 5)  # of the second request, so that those of the first are there too
    (ingress,) = [span for span in collector.all_spans() if span.name == "/generate" and span.trace_id != TRACE]
    spans = collector.spans(ingress.trace_id, 5)
    assert (spans["generate"].parent_id, ingress.parent_id) == (ingress.span_id, "")
    assert {span.tracestate for span in spans.values()} == {""}


def test_the_caller_decides_whether_its_trace_is_recorded(collector: Collector) -> None:
    quiet = {**HEADERS, "traceparent": f"00-{'1' * 32}-{CALLER}-00"}
    ask(collector, quiet, HEADERS)
    collector.spans(TRACE, 5)
    assert {span.trace_id for span in collector.all_spans()} == {TRACE}


def test_a_share_is_of_the_traces_that_begin_here(collector: Collector) -> None:
    ask(collector, {}, HEADERS, sample_ratio=0.0)
    collector.spans(TRACE, 5)
    assert {span.trace_id for span in collector.all_spans()} == {TRACE}


def test_a_call_without_http_begins_its_trace_at_the_driver(collector: Collector) -> None:
    async def call() -> None:
        backend: Any = LocalBackend(lambda: driver_over(start_engine(RankInProcess()), tracing=tracing_to(collector)))
        await NativeApi(service_of(backend)).generate(BODY)

    run(call())
    (span,) = collector.spans("", 1).values()
    assert (span.name, span.parent_id) == ("generate", "")


def test_what_is_left_is_sent_when_a_replica_ends(collector: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "600000")

    async def serve_and_end() -> None:
        driver = driver_over(start_engine(RankInProcess()), tracing=tracing_to(collector))
        backend: Any = LocalBackend(lambda: driver)
        app = make_app(service_of(backend, tracing={"otlp_endpoint": collector.endpoint}))
        transport = httpx.ASGITransport(app)
        async with app.router.lifespan_context(app), httpx.AsyncClient(transport=transport, base_url="http://loray") as client:
            await client.post("/generate", json=BODY, headers=HEADERS)
            assert not collector.all_spans()
        driver.__del__()

    run(serve_and_end())
    collector.spans(TRACE, 5, timeout_s=0)


def test_a_collector_that_does_not_answer_harms_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")  # seconds
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}/v1/traces"
        with live(make_app(service_of(saying("x"), tracing={"otlp_endpoint": endpoint}))) as url:
            assert httpx.post(f"{url}/generate", json=BODY, headers=HEADERS, timeout=30).status_code == 200
            connection, _ = silent.accept()  # the exporter waits for it from now on
            with connection:
                assert httpx.post(f"{url}/generate", json=BODY, headers=HEADERS, timeout=30).status_code == 200
