"""An OpenTelemetry collector on a real socket: takes what exporters send over HTTP, and keeps the spans."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest, ExportTraceServiceResponse


@dataclass(frozen=True)
class CollectedSpan:
    name: str
    trace_id: str
    span_id: str
    parent_id: str  # "" = none
    tracestate: str
    start_ns: int
    end_ns: int
    attributes: dict[str, Any]
    service: str


class Collector:
    def __init__(self) -> None:
        self.headers: list[dict[str, str]] = []  # of each export
        self._spans: list[CollectedSpan] = []
        self._changed = threading.Condition()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self.endpoint = f"http://127.0.0.1:{self._server.server_address[1]}/v1/traces"

    def spans(self, trace_id: str, num: int, timeout_s: float = 20.0) -> dict[str, CollectedSpan]:
        """Of the trace, "" = of all, by name, once there are so many of them."""
        with self._changed:
            assert self._changed.wait_for(lambda: len(self._of(trace_id)) >= num, timeout_s), f"only {self._of(trace_id)}"
            found = self._of(trace_id)
        assert len(found) == num == len({span.name for span in found}), found
        return {span.name: span for span in found}

    def all_spans(self) -> list[CollectedSpan]:
        with self._changed:
            return list(self._spans)

    def take(self, path: str, headers: dict[str, str], body: bytes) -> None:
        assert path == "/v1/traces" and headers["content-type"] == "application/x-protobuf"
        spans = list(_spans(ExportTraceServiceRequest.FromString(body)))
        with self._changed:
            self.headers.append(headers)
            self._spans += spans
            self._changed.notify_all()

    def _of(self, trace_id: str) -> list[CollectedSpan]:
        return [span for span in self._spans if trace_id in ("", span.trace_id)]


@contextmanager
def collecting() -> Iterator[Collector]:
    collector = Collector()
    thread = threading.Thread(target=collector._server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield collector
    finally:
        collector._server.shutdown()
        collector._server.server_close()
        thread.join(20)


def _handler(collector: Collector) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            collector.take(self.path, {name.lower(): value for name, value in self.headers.items()}, body)
            answer = ExportTraceServiceResponse().SerializeToString()
            self.send_response(200)
            self.send_header("Content-Type", "application/x-protobuf")
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *args: Any) -> None:
            pass

    return Handler


def _spans(request: ExportTraceServiceRequest) -> Iterator[CollectedSpan]:
    for resource_spans in request.resource_spans:
        service = _values(resource_spans.resource.attributes)["service.name"]
        for scope_spans in resource_spans.scope_spans:
            for span in scope_spans.spans:
                yield CollectedSpan(
                    span.name,
                    span.trace_id.hex(),
                    span.span_id.hex(),
                    span.parent_span_id.hex(),
                    span.trace_state,
                    span.start_time_unix_nano,
                    span.end_time_unix_nano,
                    _values(span.attributes),
                    service,
                )


def _values(attributes: Any) -> dict[str, Any]:
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in attributes}
