"""The native API: a request becomes a generation or an embedding, and that becomes LoRAX's response shapes. Knows nothing of Ray."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Response
from fastapi.responses import JSONResponse

from loray.deployments import sse
from loray.deployments.caller_token import caller_token
from loray.deployments.config import ApiKeyArgs
from loray.deployments.error_docs import NATIVE_MODEL, NATIVE_TEXT
from loray.deployments.error_shapes import native_body
from loray.deployments.errors import InvalidRequest
from loray.deployments.generation import OFF_LOOP_TOKENS, GeneratedToken, Generation, Timing
from loray.deployments.json_answer import json_answer
from loray.deployments.json_route import JsonRoute
from loray.deployments.merge import merge
from loray.deployments.native_headers import request_headers, time_headers, token_headers
from loray.deployments.native_request import (
    ClassifyBatchBody,
    EmbedBody,
    EmbedParameters,
    GenerateBody,
    Parameters,
    TokenizeBody,
    adapter_ref,
    check_best_of,
    check_streamed,
    parse,
    sampling_of,
)
from loray.deployments.native_shapes import (
    ANSWER,
    EVENTS,
    EmbedShape,
    Finished,
    GenerateShape,
    SpanShape,
    details_shape,
    event_shape,
    num_told,
    stream_details_shape,
)
from loray.deployments.off_loop import in_turn_if
from loray.deployments.prompt_texts import check_text, last_ids, prompt_ids
from loray.deployments.request import AdapterRef, GenerationRequest
from loray.deployments.service import FieldNames, Service, Wanted
from loray.deployments.tokenizer import TokenSpan

NAMES = FieldNames(prompt="inputs", max_new_tokens="max_new_tokens")
NO_CLASSES = "inputs: this server's model generates text and makes embeddings; it does not classify tokens"


class NativeApi:
    """`generate`, `generate_stream` and `embed` are also the Python handle's; they take a dict and raise LorayError.

    A `token` is the caller's own, for adapters, where the parameters have none."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def generate(self, body: Any) -> dict[str, Any]:
        response, _ = await self.respond(parse(GenerateBody, body), Timing())
        return {**response}

    async def generate_stream(self, body: Any) -> AsyncGenerator[dict[str, Any], None]:
        timing = Timing()
        call = await self.prepare_stream(parse(GenerateBody, body), timing)
        async with aclosing(self.stream(call, timing)) as batches:
            async for batch in batches:
                for event in batch:
                    yield event

    async def embed(self, body: Any) -> dict[str, Any]:
        response, _ = await self.respond_embed(parse(EmbedBody, body), Timing())
        return {**response}

    async def prepare(self, body: GenerateBody, timing: Timing, token: str = "") -> "Call":
        """Everything that can be wrong with a request before the model sees it."""
        parameters = body.parameters or Parameters()
        check_best_of(parameters, self._service.args.limits.max_best_of)
        adapter = adapter_of(parameters, token)
        async with self._service.in_time(timing.received):
            token_ids = await self._prompt_ids(body.inputs, parameters.truncate)
            grammar = await self._grammar(parameters)
        wanted = Wanted(
            sampling=sampling_of(parameters, grammar),
            adapter=adapter,
            max_new_tokens=parameters.max_new_tokens,
            ignore_eos=bool(parameters.ignore_eos_token),
            prompt_logprobs=bool(parameters.decoder_input_details),
        )
        return Call(body.inputs, parameters, self._service.request(token_ids, wanted, NAMES))

    async def prepare_stream(self, body: GenerateBody, timing: Timing, token: str = "") -> "Call":
        check_streamed(body.parameters or Parameters())
        return await self.prepare(body, timing, token)

    async def respond(self, body: GenerateBody, timing: Timing, token: str = "") -> tuple[GenerateShape, dict[str, str]]:
        """The response and its headers."""
        if body.stream:
            raise InvalidRequest("stream: true is for /generate_stream and for POST /", "stream")
        call = await self.prepare(body, timing, token)
        sequences = await self._finish_all(call, timing)
        best = max(sequences, key=lambda sequence: sequence.mean_logprob)
        response: GenerateShape = {"generated_text": best.text}
        if call.parameters.details or call.parameters.decoder_input_details:
            prompt = await sequences[0].generation.prompt_tokens() if call.parameters.decoder_input_details else []
            others = [sequence for sequence in sequences if sequence is not best]
            is_large = len(prompt) + sum(len(sequence.tokens) for sequence in sequences) > OFF_LOOP_TOKENS
            response["details"] = await in_turn_if(is_large, lambda: details_shape(best, others, prompt))
        return response, self._headers(call, best.generation, max(sequence.generation.timing.finished for sequence in sequences))

    async def stream(self, call: "Call", timing: Timing) -> sse.Batches:
        text = ""
        async with self._service.generation(call.request.resting(not call.stops), call.stops, timing) as generation:
            async for piece in generation:
                text += piece.text
                events = [event_shape(token) for token in piece.tokens]
                if piece.finish_reason:
                    events[-1] |= {"generated_text": call.full_text(text, generation), "details": stream_details_shape(generation)}
                yield events

    async def stream_response(self, body: GenerateBody, timing: Timing, token: str) -> sse.EventStream:
        call = await self.prepare_stream(body, timing, token)
        headers = partial(request_headers, self._service, call.inputs, call.request, timing)
        keep_alive_s = self._service.args.limits.keep_alive_s
        return await sse.event_stream(self.stream(call, timing), headers, native_body, keep_alive_s=keep_alive_s)

    async def respond_embed(self, body: EmbedBody, timing: Timing, token: str = "") -> tuple[EmbedShape, dict[str, str]]:
        """The response and its headers."""
        parameters = body.parameters or EmbedParameters()
        adapter = adapter_of(parameters, token)
        async with self._service.in_time(timing.received):
            token_ids = await self._prompt_ids(body.inputs)
        request = self._service.embedding_request(token_ids, adapter, NAMES.prompt)
        embedding = await self._service.embed(request, NAMES.prompt, timing)
        headers = request_headers(self._service, body.inputs, request, timing) | time_headers(timing)
        return {"embeddings": embedding}, headers | {"x-total-tokens": str(len(token_ids))}

    async def respond_tokenize(self, body: TokenizeBody) -> Response:
        check_text(self._service, body.inputs, NAMES.prompt)
        (spans,) = await self._service.tokenizer.spans([body.inputs], body.add_special_tokens is not False)
        return await asyncio.to_thread(_spans_response, body.inputs, spans)

    async def _prompt_ids(self, inputs: str, truncate: int | None = None) -> list[int]:
        if truncate is not None:
            return await last_ids(self._service, inputs, truncate, NAMES.prompt)
        (token_ids,) = await prompt_ids(self._service, [inputs], [NAMES.prompt])
        return token_ids

    async def _grammar(self, parameters: Parameters) -> bytes:
        """Compiled; empty for none."""
        spec = parameters.response_format.spec if parameters.response_format else None
        return await self._service.grammars.compile(spec, "response_format") if spec else b""

    async def _finish_all(self, call: "Call", timing: Timing) -> list[Finished]:
        """As many sequences as are wanted, at once. Cancelling it, or an error of one, ends them all."""
        others = [(self._service.again(call.request), Timing(timing.received)) for _ in range(1, call.parameters.num_sequences)]
        begun = [(call.request, timing), *others]
        sources = [self._finish(call, index, request, timing) for index, (request, timing) in enumerate(begun)]
        async with aclosing(sources[0] if len(sources) == 1 else merge(sources)) as finished:
            by_index = {index: sequence async for index, sequence in finished}
        return [by_index[index] for index in range(len(sources))]

    async def _finish(
        self, call: "Call", index: int, request: GenerationRequest, timing: Timing
    ) -> AsyncGenerator[tuple[int, Finished], None]:
        tokens: list[GeneratedToken] = []
        text = ""
        async with self._service.generation(request, call.stops, timing) as generation:
            async for piece in generation:
                text += piece.text
                tokens += piece.tokens
        yield index, Finished(generation, call.full_text(text, generation), tokens)

    def _headers(self, call: "Call", generation: Generation, finished: float) -> dict[str, str]:
        timing = replace(generation.timing, finished=finished)
        return {
            **request_headers(self._service, call.inputs, call.request, timing),
            **time_headers(timing),
            **token_headers(generation.num_prompt_tokens, generation.num_tokens, timing),
        }


def adapter_of(parameters: Parameters | EmbedParameters, token: str) -> AdapterRef | None:
    api_token = token if parameters.api_token is None else parameters.api_token
    return adapter_ref(parameters.adapter_id, parameters.adapter_source, api_token, parameters.merged_adapters)


def _spans_response(text: str, spans: list[TokenSpan]) -> JSONResponse:
    return JSONResponse([{"id": span.id, "text": text[span.start : span.stop], "start": span.start, "stop": span.stop} for span in spans])


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


def make_router(service: Service) -> APIRouter:
    api = NativeApi(service)
    router = APIRouter(tags=["native"], route_class=JsonRoute)
    _add_generation(router, api, service.args.api_keys)
    _add_embedding(router, api, service.args.api_keys)
    _add_token_routes(router, api)
    return router


def _add_generation(router: APIRouter, api: NativeApi, keys: ApiKeyArgs) -> None:
    Token = Annotated[str, Depends(caller_token(keys))]

    @router.post("/generate", response_model=GenerateShape, responses={200: ANSWER, **NATIVE_MODEL})
    async def generate(body: GenerateBody, token: Token) -> Response:
        """One generation, answered whole."""
        response, headers = await api.respond(body, Timing(), token)
        return await json_answer(lambda: response, num_told(response) > OFF_LOOP_TOKENS, headers)

    @router.post("/generate_stream", status_code=200, response_class=sse.EventStream, responses={200: EVENTS, **NATIVE_MODEL})
    async def generate_stream(body: GenerateBody, token: Token) -> Response:
        """One generation, one server-sent event a token."""
        return await api.stream_response(body, Timing(), token)

    @router.post("/", response_model=list[GenerateShape], responses={200: EVENTS, **NATIVE_MODEL})
    @router.post("/invocations", response_model=list[GenerateShape], responses={200: EVENTS, **NATIVE_MODEL})
    async def compatible(body: GenerateBody, token: Token) -> Response:
        """Streamed or whole, as `stream` says; whole is an array of one."""
        timing = Timing()
        if body.stream:
            return await api.stream_response(body, timing, token)
        response, headers = await api.respond(body, timing, token)
        return await json_answer(lambda: [response], num_told(response) > OFF_LOOP_TOKENS, headers)


def _add_embedding(router: APIRouter, api: NativeApi, keys: ApiKeyArgs) -> None:
    Token = Annotated[str, Depends(caller_token(keys))]

    @router.post("/embed", response_model=EmbedShape, responses={200: ANSWER, **NATIVE_MODEL})
    async def embed(body: EmbedBody, token: Token) -> Response:
        """One text as a vector: its final hidden states, pooled."""
        response, headers = await api.respond_embed(body, Timing(), token)
        return JSONResponse(response, headers=headers)


def _add_token_routes(router: APIRouter, api: NativeApi) -> None:
    """The tokens of a text, and what kinds they are of."""

    @router.post("/classify", response_model=None, status_code=422, responses=NATIVE_TEXT)
    async def classify(body: EmbedBody) -> Response:
        """The entities in a text: always refused, for the models served here do not classify."""
        raise InvalidRequest(NO_CLASSES, "inputs")

    @router.post("/classify_batch", response_model=None, status_code=422, responses=NATIVE_TEXT)
    async def classify_batch(body: ClassifyBatchBody) -> Response:
        """The entities in several texts: always refused, as /classify."""
        raise InvalidRequest(NO_CLASSES, "inputs")

    @router.post("/tokenize", response_model=list[SpanShape], responses=NATIVE_TEXT)
    async def tokenize(body: TokenizeBody) -> Response:
        """The tokens of a text; start and stop count characters."""
        return await api.respond_tokenize(body)
