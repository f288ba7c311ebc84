"""The native API: a request becomes a generation or an embedding, and that becomes LoRAX's response shapes. Knows nothing of Ray."""

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any
from urllib.parse import quote

from fastapi import APIRouter, Response
from fastapi.responses import JSONResponse

from loray.deployments import sse
from loray.deployments.error_shapes import native_body
from loray.deployments.errors import InvalidRequest
from loray.deployments.generation import GeneratedToken, Generation, Timing
from loray.deployments.native_request import (
    NOT_BUILT,
    EmbedBody,
    EmbedParameters,
    GenerateBody,
    Parameters,
    TokenizeBody,
    adapter_ref,
    parse,
    refuse_not_built,
    sampling_of,
)
from loray.deployments.request import GenerationRequest
from loray.deployments.service import FieldNames, Service, Wanted

NAMES = FieldNames(prompt="inputs", max_new_tokens="max_new_tokens")
PRINTABLE = "".join(map(chr, range(32, 127)))


class NativeApi:
    """`generate`, `generate_stream` and `embed` are also the Python handle's; they take a dict and raise LorayError."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def generate(self, body: Any) -> dict[str, Any]:
        return (await self.respond(parse(GenerateBody, body), Timing()))[0]

    async def generate_stream(self, body: Any) -> AsyncGenerator[dict[str, Any], None]:
        timing = Timing()
        call = await self.prepare(parse(GenerateBody, body))
        async with aclosing(self.stream(call, timing)) as batches:
            async for batch in batches:
                for event in batch:
                    yield event

    async def embed(self, body: Any) -> dict[str, Any]:
        return (await self.respond_embed(parse(EmbedBody, body), Timing()))[0]

    async def prepare(self, body: GenerateBody) -> "Call":
        """Everything that can be wrong with a request before the model sees it."""
        parameters = body.parameters or Parameters()
        refuse_not_built(parameters, NOT_BUILT)
        adapter = adapter_ref(parameters.adapter_id, parameters.adapter_source, parameters.api_token, parameters.merged_adapters)
        prompt_ids = await self._service.tokenizer.encode(body.inputs)
        if parameters.truncate is not None:
            prompt_ids = prompt_ids[-parameters.truncate :]
        wanted = Wanted(
            sampling=sampling_of(parameters),
            adapter=adapter,
            max_new_tokens=parameters.max_new_tokens,
            ignore_eos=bool(parameters.ignore_eos_token),
        )
        request = self._service.request(prompt_ids, wanted, NAMES)
        return Call(body.inputs, parameters, request)

    async def respond(self, body: GenerateBody, timing: Timing) -> tuple[dict[str, Any], dict[str, str]]:
        """The response and its headers."""
        if body.stream:
            raise InvalidRequest("stream: true is for /generate_stream and for POST /", "stream")
        call = await self.prepare(body)
        tokens: list[dict[str, Any]] = []
        text = ""
        async with self._service.generation(call.request, call.stops, timing) as generation:
            async for piece in generation:
                text += piece.text
                tokens += map(token_shape, piece.tokens)
        response: dict[str, Any] = {"generated_text": call.full_text(text, generation)}
        if call.parameters.details:
            response["details"] = {**details_shape(generation), "prefill": [], "tokens": tokens}
        return response, {**self._first_headers(call, timing), **last_headers(generation)}

    async def stream(self, call: "Call", timing: Timing) -> sse.Batches:
        text = ""
        async with self._service.generation(call.request, call.stops, timing) as generation:
            async for piece in generation:
                text += piece.text
                events = [event_shape(token) for token in piece.tokens]
                if piece.finish_reason:
                    events[-1] |= {"generated_text": call.full_text(text, generation), "details": details_shape(generation)}
                yield events

    async def stream_response(self, body: GenerateBody, timing: Timing) -> sse.EventStream:
        call = await self.prepare(body)
        return await sse.event_stream(self.stream(call, timing), lambda: self._first_headers(call, timing), native_body)

    async def respond_embed(self, body: EmbedBody, timing: Timing) -> tuple[dict[str, Any], dict[str, str]]:
        """The response and its headers."""
        parameters = body.parameters or EmbedParameters()
        adapter = adapter_ref(parameters.adapter_id, parameters.adapter_source, parameters.api_token, parameters.merged_adapters)
        prompt_ids = await self._service.tokenizer.encode(body.inputs)
        request = self._service.embedding_request(prompt_ids, adapter, NAMES.prompt)
        embedding = await self._service.embed(request, NAMES.prompt, timing)
        headers = {
            **self._request_headers(body.inputs, request, timing),
            **time_headers(timing),
            "x-total-tokens": str(len(prompt_ids)),
        }
        return {"embeddings": embedding}, headers

    def _first_headers(self, call: "Call", timing: Timing) -> dict[str, str]:
        """What is known when the first token is there."""
        headers = self._request_headers(call.inputs, call.request, timing)
        return headers | {"x-time-to-first-token": milliseconds(timing.received, timing.first_token)}

    def _request_headers(self, inputs: str, request: GenerationRequest, timing: Timing) -> dict[str, str]:
        headers = {
            "x-compute-type": self._service.compute_type,
            "x-compute-characters": str(len(inputs)),
            "x-validation-time": milliseconds(timing.received, timing.validated),
            "x-queue-time": milliseconds(timing.validated, timing.accepted),
            "x-prompt-tokens": str(len(request.prompt_ids)),
            "x-model-id": header_text(self._service.model_id),
        }
        if request.adapter:
            scheme, is_url, _ = request.adapter_id.partition("://")
            source = request.adapter.source or (scheme if is_url else self._service.args.adapters.default_source)
            merge = request.adapter.merge
            adapter_ids = ",".join(merge.adapter_ids) if merge else request.adapter_id
            headers |= {"x-adapter-id": header_text(adapter_ids), "x-adapter-source": source}
        return headers


class Call:
    """A native request that passed validation."""

    def __init__(self, inputs: str, parameters: Parameters, request: GenerationRequest) -> None:
        self.inputs = inputs
        self.parameters = parameters
        self.request = request
        self.stops: list[str] = parameters.stop or []

    def full_text(self, text: str, generation: Generation) -> str:
        """The stop string stays; text that came after it within the same token does not."""
        prompt = self.inputs if self.parameters.return_full_text else ""
        return prompt + text + generation.stop_text


def token_shape(token: GeneratedToken) -> dict[str, Any]:
    return {"id": token.id, "text": token.text, "logprob": token.logprob, "special": token.is_special, "skipped": False}


def event_shape(token: GeneratedToken) -> dict[str, Any]:
    return {"token": token_shape(token), "generated_text": None, "details": None}


def details_shape(generation: Generation) -> dict[str, Any]:
    sampling = generation.request.sampling
    return {
        "finish_reason": generation.finish_reason,
        "prompt_tokens": generation.num_prompt_tokens,
        "generated_tokens": generation.num_tokens,
        "skipped_tokens": 0,
        "seed": sampling.seed if sampling.temperature else None,  # greedy used none
    }


def last_headers(generation: Generation) -> dict[str, str]:
    inference_seconds = generation.timing.finished - generation.timing.accepted
    return {
        **time_headers(generation.timing),
        "x-time-per-token": milliseconds(0, inference_seconds / generation.num_tokens),
        "x-generated-tokens": str(generation.num_tokens),
        "x-total-tokens": str(generation.num_prompt_tokens + generation.num_tokens),
        "x-skipped-tokens": "0",
    }


def time_headers(timing: Timing) -> dict[str, str]:
    total = milliseconds(timing.received, timing.finished)
    return {"x-compute-time": total, "x-total-time": total, "x-inference-time": milliseconds(timing.accepted, timing.finished)}


def milliseconds(start: float, end: float) -> str:
    return str(max(0, round((end - start) * 1000)))


def header_text(text: str) -> str:
    """Headers carry printable ASCII; the rest is percent-encoded."""
    return quote(text, safe=PRINTABLE)


def make_router(service: Service) -> APIRouter:
    api = NativeApi(service)
    router = APIRouter(tags=["native"])

    @router.post("/generate", response_model=None)
    async def generate(body: GenerateBody) -> Response:
        """One generation, answered whole."""
        response, headers = await api.respond(body, Timing())
        return JSONResponse(response, headers=headers)

    @router.post("/generate_stream", response_model=None)
    async def generate_stream(body: GenerateBody) -> Response:
        """One generation, one server-sent event a token."""
        return await api.stream_response(body, Timing())

    @router.post("/", response_model=None)
    @router.post("/invocations", response_model=None)
    async def compatible(body: GenerateBody) -> Response:
        """Streamed or whole, as `stream` says; whole is an array of one."""
        timing = Timing()
        if body.stream:
            return await api.stream_response(body, timing)
        response, headers = await api.respond(body, timing)
        return JSONResponse([response], headers=headers)

    @router.post("/embed", response_model=None)
    async def embed(body: EmbedBody) -> Response:
        """One text as a vector: its final hidden states, pooled."""
        response, headers = await api.respond_embed(body, Timing())
        return JSONResponse(response, headers=headers)

    @router.post("/tokenize")
    async def tokenize(body: TokenizeBody) -> Sequence[dict[str, Any]]:
        """The tokens of a text; start and stop count characters."""
        spans = await service.tokenizer.spans(body.inputs, body.add_special_tokens is not False)
        return [{"id": span.id, "text": body.inputs[span.start : span.stop], "start": span.start, "stop": span.stop} for span in spans]

    return router
