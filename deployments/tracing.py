"""OpenTelemetry: this process's spans, sent in the background. Imports nothing of it unless it is configured, and knows no requests."""

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from loray.deployments.config import TracingArgs
from loray.deployments.trace_context import TraceContext

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import Span


def make_tracing(args: TracingArgs) -> "Tracing | None":
    """None if it is not configured."""
    exporter = otlp_exporter(args)
    return Tracing(exporter, args) if exporter else None


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
    """Whoever began a trace decides whether it is recorded; of those that begin here a share is."""

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

    def start_server(self, trace: TraceContext) -> "Span":
        """The span, from now on, of a request that came from outside. A trace begins with it where there is none."""
        from opentelemetry.trace import SpanKind

        return self._tracer.start_span("request", remote(trace), SpanKind.SERVER)

    def record(self, name: str, under: "Context", period: tuple[float, float], attributes: Mapping[str, Any]) -> None:
        """A span that is over; its period is in seconds of the monotonic clock."""
        start, stop = period
        span = self._tracer.start_span(name, under, attributes=attributes, start_time=_nanoseconds(start))
        span.end(_nanoseconds(stop))

    def close(self) -> None:
        """Sends what is left."""
        self._provider.shutdown()


def remote(trace: TraceContext) -> "Context":
    """Under a span of another process."""
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    return TraceContextTextMapPropagator().extract({"traceparent": trace.traceparent, "tracestate": trace.tracestate})


def under(span: "Span", tracestate: str) -> TraceContext:
    """What other processes must know to put their spans under this one."""
    here = span.get_span_context()
    return TraceContext(f"00-{here.trace_id:032x}-{here.span_id:016x}-{here.trace_flags:02x}", tracestate)


def _nanoseconds(moment: float) -> int:
    """Of the monotonic clock -> since 1970."""
    return time.time_ns() - round((time.monotonic() - moment) * 1e9)
