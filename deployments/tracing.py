"""OpenTelemetry spans of finished requests, made from the times that were noted. Imports nothing of it unless it is configured."""

import re
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from loray.deployments.config import TracingArgs
from loray.deployments.generation import Timing
from loray.deployments.request_log import RequestNote

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

TRACEPARENT = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(-.*)?")


def sane_traceparent(header: str) -> str:
    """As it is, or "" if it is none."""
    return header if TRACEPARENT.fullmatch(header) else ""


def otlp_exporter(args: TracingArgs) -> "SpanExporter | None":
    """None if none is configured."""
    if args.otlp_endpoint is None:
        return None
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    except ImportError as error:
        raise ImportError("tracing.otlp_endpoint needs the extra `otel`: pip install 'loray[otel]'") from error
    return OTLPSpanExporter(endpoint=args.otlp_endpoint)


class Tracing:
    """One span for the HTTP request; under it, for each sequence, the time in the queue, of the prefill and of the decoding."""

    def __init__(self, exporter: "SpanExporter", args: TracingArgs) -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased

        self._provider = TracerProvider(
            sampler=ParentBased(TraceIdRatioBased(args.sample_ratio)), resource=Resource.create({"service.name": args.service_name})
        )
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("loray")

    def record(self, note: RequestNote, route: str, status: str, seconds: float) -> None:
        """Once, when the request is over; it took so many seconds."""
        from opentelemetry.trace import SpanKind, set_span_in_context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        end = time.monotonic()
        attributes: dict[str, Any] = {"http.route": route, "http.response.status_code": int(status), "loray.request_id": note.request_id}
        attributes |= {"gen_ai.usage.input_tokens": note.num_prompt_tokens, "gen_ai.usage.output_tokens": note.num_tokens}
        if note.error_type:
            attributes["error.type"] = note.error_type
        parent = TraceContextTextMapPropagator().extract({"traceparent": note.traceparent})
        span = self._tracer.start_span(route, parent, SpanKind.SERVER, attributes, start_time=_nanoseconds(end - seconds))
        inside = set_span_in_context(span)
        for sequence in note.sequences:
            named = {"loray.adapter_id": sequence.request.adapter_id, "loray.outcome": sequence.outcome}
            for name, start, stop in _phases(sequence.timing):
                part = self._tracer.start_span(name, inside, attributes=named, start_time=_nanoseconds(start))
                part.end(_nanoseconds(stop))
        span.end(_nanoseconds(end))

    def close(self) -> None:
        """Sends what is left."""
        self._provider.shutdown()


def _phases(timing: Timing) -> Iterator[tuple[str, float, float]]:
    """Each with its beginning and end, as far as the request came."""
    moments = [
        ("queue", timing.validated),
        ("prefill", timing.admitted or timing.first_token),
        ("decode", timing.first_token),
        ("", timing.finished),
    ]
    known = [(name, moment) for name, moment in moments if moment]
    for (name, start), (_, stop) in zip(known, known[1:], strict=False):
        yield name, start, max(start, stop)


def _nanoseconds(moment: float) -> int:
    """Of the monotonic clock -> since 1970."""
    return time.time_ns() - round((time.monotonic() - moment) * 1e9)
