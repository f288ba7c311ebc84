"""What became of each request at this replica: a line in the log and, where that is configured, a span. Knows no tokens."""

import logging
import time
from typing import Any

from loray.deployments.engine import ABORTED
from loray.deployments.log_line import log_line
from loray.deployments.request import GenerationRequest
from loray.deployments.sequence import Ending
from loray.deployments.tracing import Tracing, remote

logger = logging.getLogger("ray.serve.loray")


class DriverLog:
    def __init__(self, tracing: Tracing | None) -> None:
        self._tracing = tracing

    def tell(self, request: GenerationRequest, received: float, ending: Ending) -> None:
        """Once, when it is over here. It was received at that moment of the monotonic clock."""
        now = time.monotonic()
        logger.info("%s", log_line("sequence", _fields(request, received, ending, now)))
        if self._tracing:
            name = "embed" if request.pooling else "generate"
            self._tracing.record(name, remote(request.trace), (received, now), _attributes(request, received, ending))


def _fields(request: GenerationRequest, received: float, ending: Ending, now: float) -> dict[str, object]:
    fields: dict[str, object] = {"id": request.request_id}
    if request.trace.trace_id:
        fields["trace"] = request.trace.trace_id
    fields |= {"adapter": request.adapter_id or "-", "prompt_tokens": len(request.prompt_ids), "tokens": ending.num_tokens}
    fields |= {"outcome": ending.outcome, "ms": round((now - received) * 1000), "queue_ms": round(ending.queue_s * 1000)}
    if ending.first_token_at:
        fields["first_token_ms"] = round((ending.first_token_at - received) * 1000)
    if ending.reason:
        fields["reason"] = ending.reason
    return fields


def _attributes(request: GenerationRequest, received: float, ending: Ending) -> dict[str, Any]:
    """Times in seconds; `loray.request_id` begins with that of the HTTP request."""
    attributes: dict[str, Any] = {
        "loray.request_id": request.request_id,
        "loray.adapter_id": request.adapter_id,
        "loray.outcome": ending.outcome,
        "loray.queue_time": ending.queue_s,
        "gen_ai.usage.input_tokens": len(request.prompt_ids),
        "gen_ai.usage.output_tokens": ending.num_tokens,
    }
    if ending.first_token_at:
        attributes["loray.time_to_first_token"] = ending.first_token_at - received
    if ending.error not in ("", ABORTED):  # a stop string is found by ingress, which then aborts
        attributes["error.type"] = ending.error
    return attributes
