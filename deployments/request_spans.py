"""The spans of an HTTP request: one for itself; under it, for each sequence, the time in the queue, of the prefill and of the decoding.
Knows no bodies."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from loray.deployments.generation import Timing
from loray.deployments.request_log import RequestNote
from loray.deployments.tracing import Tracing, under

if TYPE_CHECKING:
    from opentelemetry.trace import Span


class RequestSpans:
    def __init__(self, tracing: Tracing) -> None:
        self._tracing = tracing

    def begin(self, note: RequestNote) -> "Span":
        """What is done for the request from now on belongs under it: the note says so."""
        span = self._tracing.start_server(note.trace)
        note.trace = under(span, note.trace.tracestate)
        return span

    def end(self, span: "Span", note: RequestNote, route: str, status: str) -> None:
        from opentelemetry.trace import set_span_in_context

        attributes: dict[str, Any] = {"http.route": route, "http.response.status_code": int(status), "loray.request_id": note.request_id}
        attributes |= {"gen_ai.usage.input_tokens": note.num_prompt_tokens, "gen_ai.usage.output_tokens": note.num_tokens}
        if note.error_type:
            attributes["error.type"] = note.error_type
        span.update_name(route)
        span.set_attributes(attributes)
        for sequence in note.sequences:
            named = {"loray.adapter_id": sequence.request.adapter_id, "loray.outcome": sequence.outcome}
            for name, start, stop in _phases(sequence.timing):
                self._tracing.record(name, set_span_in_context(span), (start, stop), named)
        span.end()


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
