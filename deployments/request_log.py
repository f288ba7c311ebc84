"""What one HTTP request was about: noted on its way, told in one line when it is over. Knows neither bodies nor shapes.

The note travels in a context variable, for it belongs to the request and not to any of the calls in between."""

import logging
import uuid
from contextvars import ContextVar
from dataclasses import dataclass, field

from loray.deployments.errors import LorayError
from loray.deployments.generation import Timing
from loray.deployments.log_line import WORD, log_line
from loray.deployments.request import GenerationRequest
from loray.deployments.trace_context import TraceContext

logger = logging.getLogger("ray.serve.loray")

QUIET_ROUTES = {"/", "/health", "/ping", "/startup", "/metrics"}  # asked all the time; told only if they fail


@dataclass(frozen=True, slots=True)
class Sequence:
    """One generation or embedding that is over."""

    request: GenerationRequest
    timing: Timing
    num_tokens: int
    outcome: str


@dataclass(slots=True)
class RequestNote:
    request_id: str
    trace: TraceContext = TraceContext()  # the request's own span where there is one, else the caller's
    key_name: str = ""  # of the API key; "" = none needed
    error_type: str = ""
    sequences: list[Sequence] = field(default_factory=list)

    @property
    def num_prompt_tokens(self) -> int:
        return sum(len(sequence.request.prompt_ids) for sequence in self.sequences)

    @property
    def num_tokens(self) -> int:
        return sum(sequence.num_tokens for sequence in self.sequences)


_current: ContextVar[RequestNote | None] = ContextVar("request_note", default=None)


def begin(request_id: str, trace: TraceContext) -> RequestNote:
    """`request_id` is what the caller calls it, if that can be used."""
    note = RequestNote(request_id if WORD.fullmatch(request_id) else uuid.uuid4().hex, trace)
    _current.set(note)
    return note


def current() -> RequestNote | None:
    """None outside of HTTP: for Python handles and what the server asks itself."""
    return _current.get()


def new_sequence_id() -> str:
    """Begins with the HTTP request's id, so that the driver's log can be searched for it."""
    note = _current.get()
    return f"{note.request_id}-{uuid.uuid4().hex[:12]}" if note else uuid.uuid4().hex


def trace() -> TraceContext:
    """What is done for the HTTP request belongs under it."""
    note = _current.get()
    return note.trace if note else TraceContext()


def add(request: GenerationRequest, timing: Timing, num_tokens: int, outcome: str) -> None:
    note = _current.get()
    if note:
        note.sequences.append(Sequence(request, timing, num_tokens, outcome))


def add_failure(error: LorayError) -> None:
    note = _current.get()
    if note:
        note.error_type = error.error_type


def tell(note: RequestNote, route: str, status: str, seconds: float) -> None:
    if route in QUIET_ROUTES and not note.sequences and status < "400":
        return
    fields: dict[str, object] = {"id": note.request_id, "route": route, "status": status, "ms": round(seconds * 1000)}
    if note.key_name:
        fields["key"] = note.key_name
    if note.error_type:
        fields["error"] = note.error_type
    if note.trace.trace_id:
        fields["trace"] = note.trace.trace_id
    if note.sequences:
        fields |= _sequence_fields(note)
    logger.info("%s", log_line("request", fields))


def _sequence_fields(note: RequestNote) -> dict[str, object]:
    first = note.sequences[0]
    fields: dict[str, object] = {"adapter": first.request.adapter_id or "-", "prompt_tokens": note.num_prompt_tokens}
    fields |= {"tokens": note.num_tokens, "outcome": first.outcome}
    timing = first.timing
    if timing.admitted:
        fields["queue_ms"] = round((timing.admitted - timing.validated) * 1000)
    if timing.first_token:
        fields["first_token_ms"] = round((timing.first_token - timing.received) * 1000)
    return fields
