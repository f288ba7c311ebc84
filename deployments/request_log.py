"""What one HTTP request was about: noted on its way, told in one line when it is over. Knows neither bodies nor shapes.

The note travels in a context variable, for it belongs to the request and not to any of the calls in between."""

import logging
import string
import time
import uuid
from contextvars import ContextVar
from dataclasses import dataclass, field
from urllib.parse import quote

from loray.deployments.generation import Timing
from loray.deployments.log_line import log_line
from loray.deployments.request import GenerationRequest
from loray.deployments.trace_context import TraceContext

logger = logging.getLogger("ray.serve.loray")

QUIET_ROUTES = {"/", "/health", "/ping", "/startup", "/metrics"}  # asked all the time; told only if they fail
MAX_ID_CHARS = 128  # of the caller's id, in those of the sequences


@dataclass(frozen=True, slots=True)
class Sequence:
    """One generation or embedding that is over."""

    request: GenerationRequest
    timing: Timing
    num_tokens: int
    outcome: str


@dataclass(slots=True)
class RequestNote:
    request_id: str  # any characters of a header, in Latin-1
    trace: TraceContext = TraceContext()  # the request's own span where there is one, else the caller's
    key_name: str = ""  # of the API key; "" = none needed
    error_type: str = ""
    is_echo_only: bool = False  # the one token that is generated for each prompt is nobody's wish
    received: float = field(default_factory=time.monotonic)  # its head; the body may take longer
    sequences: list[Sequence] = field(default_factory=list)

    @property
    def num_prompt_tokens(self) -> int:
        """Of those that a driver took, each prompt once: the sequences that are made of one share its list."""
        prompts = [sequence.request.prompt_ids for sequence in self.sequences if sequence.timing.accepted]
        return sum({id(prompt_ids): len(prompt_ids) for prompt_ids in prompts}.values())

    @property
    def num_tokens(self) -> int:
        """Generated, as `usage` says it."""
        return 0 if self.is_echo_only else sum(sequence.num_tokens for sequence in self.sequences)


_current: ContextVar[RequestNote | None] = ContextVar("request_note", default=None)


def begin(request_id: str, trace: TraceContext) -> RequestNote:
    """`request_id` is what the caller calls it, "" for nothing."""
    note = RequestNote(request_id or uuid.uuid4().hex, trace)
    _current.set(note)
    return note


def current() -> RequestNote | None:
    """None outside of HTTP: for Python handles and what the server asks itself."""
    return _current.get()


def new_sequence_id() -> str:
    """Begins with the HTTP request's id, so that the driver's log can be searched for it; a word, whatever that is."""
    note = _current.get()
    if not note:
        return uuid.uuid4().hex
    return f"{quote(note.request_id, string.punctuation, 'latin-1')[:MAX_ID_CHARS]}-{uuid.uuid4().hex[:12]}"


def receipt(moment: float) -> float:
    """When the HTTP request came of which a route has known since that moment; that itself outside of HTTP."""
    note = _current.get()
    return note.received if note else moment


def trace() -> TraceContext:
    """What is done for the HTTP request belongs under it."""
    note = _current.get()
    return note.trace if note else TraceContext()


def add(request: GenerationRequest, timing: Timing, num_tokens: int, outcome: str) -> None:
    note = _current.get()
    if note:
        note.sequences.append(Sequence(request, timing, num_tokens, outcome))


def add_failure(error_type: str) -> None:
    note = _current.get()
    if note:
        note.error_type = error_type


def set_echo_only() -> None:
    note = _current.get()
    if note:
        note.is_echo_only = True


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
