"""The headers of native answers: counts, and times in whole milliseconds. Knows no bodies."""

from urllib.parse import quote

from loray.deployments.generation import Timing
from loray.deployments.request import GenerationRequest
from loray.deployments.service import Service

PRINTABLE = "".join(map(chr, range(32, 127)))


def request_headers(service: Service, inputs: str, request: GenerationRequest, timing: Timing) -> dict[str, str]:
    headers = {
        "x-compute-type": service.compute_type,
        "x-compute-characters": str(len(inputs)),
        "x-validation-time": milliseconds(timing.received, timing.validated),
        "x-prompt-tokens": str(len(request.prompt_ids)),
        "x-model-id": header_text(service.model_id),
    }
    if timing.admitted:
        headers["x-queue-time"] = milliseconds(timing.validated, timing.admitted)
    if timing.first_token:
        headers["x-time-to-first-token"] = milliseconds(timing.received, timing.first_token)
    if request.adapter:
        scheme, is_url, _ = request.adapter_id.partition("://")
        source = request.adapter.source or (scheme if is_url else service.args.adapters.default_source)
        merge = request.adapter.merge
        adapter_ids = ",".join(merge.adapter_ids) if merge else request.adapter_id
        headers |= {"x-adapter-id": header_text(adapter_ids), "x-adapter-source": header_text(source)}
    return headers


def token_headers(num_prompt: int, num_tokens: int, timing: Timing) -> dict[str, str]:
    """What is known when all of `num_tokens` are there."""
    return {
        "x-time-per-token": milliseconds(0, (timing.finished - timing.admitted) / num_tokens),
        "x-generated-tokens": str(num_tokens),
        "x-total-tokens": str(num_prompt + num_tokens),
        "x-skipped-tokens": "0",
    }


def time_headers(timing: Timing) -> dict[str, str]:
    total = milliseconds(timing.received, timing.finished)
    return {"x-compute-time": total, "x-total-time": total, "x-inference-time": milliseconds(timing.admitted, timing.finished)}


def milliseconds(start: float, end: float) -> str:
    return str(max(0, round((end - start) * 1000)))


def header_text(text: str) -> str:
    """Headers carry printable ASCII; the rest is percent-encoded."""
    return quote(text, safe=PRINTABLE)
