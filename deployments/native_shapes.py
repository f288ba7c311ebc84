"""The native API's answers: their shapes, as OpenAPI shows them, and how a generation becomes one. Runs nothing."""

from dataclasses import dataclass
from typing import Any, Literal, NotRequired

from typing_extensions import TypedDict  # before Python 3.12 pydantic can't read typing's

from loray.deployments.generation import GeneratedToken, Generation, PromptToken


class PrefillShape(TypedDict):
    id: int
    text: str
    logprob: float | None  # none of the first


class AlternativeShape(TypedDict):
    id: int
    text: str
    logprob: float


class TokenShape(TypedDict):
    id: int
    text: str
    logprob: float
    special: bool
    alternative_tokens: NotRequired[list[AlternativeShape]]
    skipped: bool


class SequenceShape(TypedDict):
    generated_text: str
    finish_reason: Literal["length", "eos_token", "stop_sequence"]
    generated_tokens: int
    seed: int | None
    prefill: list[PrefillShape]
    tokens: list[TokenShape]


class StreamDetailsShape(TypedDict):
    finish_reason: Literal["length", "eos_token", "stop_sequence"]
    prompt_tokens: int
    generated_tokens: int
    skipped_tokens: int
    seed: int | None


class DetailsShape(StreamDetailsShape):
    prefill: list[PrefillShape]
    tokens: list[TokenShape]
    best_of_sequences: NotRequired[list[SequenceShape]]


class GenerateShape(TypedDict):
    generated_text: str
    details: NotRequired[DetailsShape]


class EmbedShape(TypedDict):
    embeddings: list[float]


class SpanShape(TypedDict):
    id: int
    text: str
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Finished:
    """A generation that ran to its end."""

    generation: Generation
    text: str  # as it is answered
    tokens: list[GeneratedToken]

    @property
    def mean_logprob(self) -> float:
        return sum(token.logprob for token in self.tokens) / len(self.tokens)


def token_shape(token: GeneratedToken) -> TokenShape:
    shape: TokenShape = {"id": token.id, "text": token.text, "logprob": token.logprob, "special": token.is_special, "skipped": False}
    if token.alternatives:
        shape["alternative_tokens"] = [{"id": other.id, "text": other.text, "logprob": other.logprob} for other in token.alternatives]
    return shape


def prefill_shape(token: PromptToken) -> PrefillShape:
    return {"id": token.id, "text": token.text, "logprob": token.logprob}


def event_shape(token: GeneratedToken) -> dict[str, Any]:
    return {"token": token_shape(token), "generated_text": None, "details": None}


def stream_details_shape(generation: Generation) -> StreamDetailsShape:
    return {
        "finish_reason": generation.finish_reason,  # type: ignore[typeddict-item]  # these three are all that it can be
        "prompt_tokens": generation.num_prompt_tokens,
        "generated_tokens": generation.num_tokens,
        "skipped_tokens": 0,
        "seed": used_seed(generation),
    }


def details_shape(best: Finished, others: list[Finished], prompt: list[PromptToken]) -> DetailsShape:
    """`prompt` is that of all of them."""
    prefill = [prefill_shape(token) for token in prompt]
    details: DetailsShape = {**stream_details_shape(best.generation), "prefill": prefill, "tokens": [token_shape(t) for t in best.tokens]}
    if others:
        details["best_of_sequences"] = [sequence_shape(other, prefill) for other in others]
    return details


def num_told(response: GenerateShape) -> int:
    """Tokens that the answer tells of."""
    details = response.get("details")
    if not details:
        return 0
    sequences = [details, *details.get("best_of_sequences", [])]
    return sum(len(sequence["prefill"]) + len(sequence["tokens"]) for sequence in sequences)


def sequence_shape(finished: Finished, prefill: list[PrefillShape]) -> SequenceShape:
    return {
        "generated_text": finished.text,
        "finish_reason": finished.generation.finish_reason,  # type: ignore[typeddict-item]
        "generated_tokens": finished.generation.num_tokens,
        "seed": used_seed(finished.generation),
        "prefill": prefill,
        "tokens": [token_shape(token) for token in finished.tokens],
    }


def used_seed(generation: Generation) -> int | None:
    sampling = generation.request.sampling
    return sampling.seed if sampling.temperature else None  # greedy used none


def event_stream_docs(description: str) -> dict[str, Any]:
    """Before OpenAPI 3.2 the schema of an event stream is that of each event."""
    data = {"type": "string", "contentMediaType": "application/json", "description": description}
    return {"text/event-stream": {"schema": {"type": "object", "properties": {"data": data}, "required": ["data"]}}}


_TIMES = ["compute-time", "total-time", "validation-time", "queue-time", "inference-time", "time-per-token", "time-to-first-token"]
_COUNTS = ["compute-characters", "prompt-tokens", "generated-tokens", "total-tokens", "skipped-tokens"]
_WORDS = ["compute-type", "model-id", "adapter-id", "adapter-source"]
HEADERS: dict[str, dict[str, Any]] = {  # a stream has those that are known when it begins
    **{f"x-{name}": {"description": "milliseconds", "schema": {"type": "integer"}} for name in _TIMES},
    **{f"x-{name}": {"schema": {"type": "integer"}} for name in _COUNTS},
    **{f"x-{name}": {"schema": {"type": "string"}} for name in _WORDS},
}
ANSWER: dict[str, Any] = {"headers": HEADERS}
EVENTS: dict[str, Any] = {
    **ANSWER,
    "content": event_stream_docs("One event a token, {token, generated_text, details}; of an error {error, error_type}."),
}
