"""The OpenAI API: chat and text completions, embeddings, and the list of models. Shapes are in openai_shapes; knows nothing of Ray."""

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from fastapi import APIRouter, Response
from fastapi.responses import JSONResponse

from loray.deployments import sse
from loray.deployments.error_shapes import openai_body
from loray.deployments.errors import AdapterNotFound, InvalidRequest
from loray.deployments.generation import GeneratedToken, Piece, Timing
from loray.deployments.merge import merge
from loray.deployments.openai_request import (
    CHAT_NOT_BUILT,
    COMPLETION_NOT_BUILT,
    DEFAULT_COMPLETION_TOKENS,
    ChatBody,
    CompletionBody,
    EmbeddingBody,
    OpenAIBody,
)
from loray.deployments.openai_shapes import ChatShape, CompletionShape, embeddings_shape, usage_shape
from loray.deployments.request import GenerationRequest
from loray.deployments.service import FieldNames, Service, Wanted

CHAT_NAMES = FieldNames(prompt="messages", max_new_tokens="max_tokens")
COMPLETION_NAMES = FieldNames(prompt="prompt", max_new_tokens="max_tokens")
MAX_INPUTS_AT_ONCE = 64  # of one embeddings request: it must not fill the driver's queue alone
Vectors = AsyncGenerator[tuple[int, list[float]], None]


@dataclass(frozen=True, slots=True)
class Call:
    """A request that passed validation: one generation for each choice."""

    body: OpenAIBody
    requests: list[GenerationRequest]
    shape: CompletionShape
    received: float  # seconds of the monotonic clock


@dataclass(slots=True)
class Choice:
    """What one generation has given so far."""

    text: str = ""
    tokens: list[GeneratedToken] = field(default_factory=list)
    finish_reason: str = ""

    def add(self, piece: Piece) -> None:
        self.text += piece.text
        self.tokens += piece.tokens
        self.finish_reason = piece.finish_reason


class OpenAIApi:
    def __init__(self, service: Service) -> None:
        self._service = service
        self._created = int(time.time())

    async def chat_call(self, body: ChatBody) -> Call:
        received = time.monotonic()
        body.refuse(CHAT_NOT_BUILT)
        prompt_ids = await self._service.tokenizer.encode_chat([message.for_template() for message in body.messages])
        request = self._request(body, prompt_ids, body.max_new_tokens, CHAT_NAMES)
        return Call(body, [request], ChatShape(body.model, body.includes_usage, bool(body.logprobs)), received)

    async def completion_call(self, body: CompletionBody) -> Call:
        received = time.monotonic()
        body.refuse(COMPLETION_NOT_BUILT)
        requests = []
        for prompt in body.prompts:
            prompt_ids = await self._token_ids(prompt, COMPLETION_NAMES.prompt)
            room = max(1, self._service.max_total_tokens - len(prompt_ids))
            max_new_tokens = min(DEFAULT_COMPLETION_TOKENS, room) if body.max_tokens is None else body.max_tokens
            requests.append(self._request(body, prompt_ids, max_new_tokens, COMPLETION_NAMES))
        return Call(body, requests, CompletionShape(body.model, body.includes_usage), received)

    async def answer(self, call: Call) -> Response:
        if call.body.stream:
            return await sse.event_stream(self._stream(call), dict, openai_body, end=sse.DONE)
        choices = [Choice() for _ in call.requests]
        async with aclosing(self._pieces(call)) as pieces:
            async for index, piece in pieces:
                choices[index].add(piece)
        shapes = [call.shape.choice(index, choice.text, choice.tokens, choice.finish_reason) for index, choice in enumerate(choices)]
        num_tokens = sum(len(choice.tokens) for choice in choices)
        return JSONResponse(call.shape.whole(shapes, self._usage(call, num_tokens)))

    async def embeddings(self, body: EmbeddingBody) -> dict[str, Any]:
        received = time.monotonic()
        body.refuse()
        adapter = body.adapter(self._service.model_id)
        requests = {
            name: self._service.embedding_request(await self._token_ids(item, name), adapter, name) for name, item in body.inputs().items()
        }
        turns = asyncio.Semaphore(min(MAX_INPUTS_AT_ONCE, self._service.args.scheduler.max_waiting))
        sources = [self._embedding(index, request, name, Timing(received), turns) for index, (name, request) in enumerate(requests.items())]
        async with aclosing(merge(sources)) as vectors:
            by_index = {index: vector async for index, vector in vectors}
        num_tokens = sum(len(request.prompt_ids) for request in requests.values())
        return embeddings_shape(body.model, [by_index[i] for i in range(len(sources))], body.encoding_format == "base64", num_tokens)

    async def models(self) -> list[dict[str, Any]]:
        adapters = await self._service.backend.adapters()
        return [self._model_shape(self._service.model_id, None)] + [self._model_shape(name, self._service.model_id) for name in adapters]

    async def model(self, model_id: str) -> dict[str, Any]:
        adapter_id = model_id.removeprefix(f"{self._service.model_id}:")
        for shape in await self.models():
            if shape["id"] in (model_id, adapter_id):
                return {**shape, "id": model_id}
        raise AdapterNotFound(f"the model {model_id!r} does not exist")

    def _request(self, body: OpenAIBody, prompt_ids: list[int], max_new_tokens: int | None, names: FieldNames) -> GenerationRequest:
        adapter = body.adapter(self._service.model_id)
        wanted = Wanted(sampling=body.sampling(), adapter=adapter, max_new_tokens=max_new_tokens, ignore_eos=bool(body.ignore_eos))
        return self._service.request(prompt_ids, wanted, names)

    async def _token_ids(self, prompt: str | list[int], name: str) -> list[int]:
        if isinstance(prompt, str):
            return await self._service.tokenizer.encode(prompt)
        vocab_size = self._service.tokenizer.vocab_size
        for token_id in prompt:
            if not 0 <= token_id < vocab_size:
                raise InvalidRequest(f"{name}: {token_id} is not a token id of this model; they end at {vocab_size - 1}", name)
        return prompt

    async def _embedding(self, index: int, request: GenerationRequest, name: str, timing: Timing, turns: asyncio.Semaphore) -> Vectors:
        async with turns:
            vector = await self._service.embed(request, name, timing)
        yield index, vector

    def _pieces(self, call: Call) -> AsyncGenerator[tuple[int, Piece], None]:
        """Of all the choices, with the choice's index."""
        sources = [self._pieces_of(call, index) for index in range(len(call.requests))]
        return sources[0] if len(sources) == 1 else merge(sources)

    async def _pieces_of(self, call: Call, index: int) -> AsyncGenerator[tuple[int, Piece], None]:
        async with self._service.generation(call.requests[index], call.body.stops, Timing(call.received)) as generation:
            async for piece in generation:
                yield index, piece

    async def _stream(self, call: Call) -> sse.Batches:
        num_tokens = 0
        async with aclosing(self._pieces(call)) as pieces:
            async for index, piece in pieces:
                num_tokens += len(piece.tokens)
                chunks = call.shape.chunks(index, piece.text, piece.tokens, piece.finish_reason)
                if chunks:
                    yield chunks
        if call.body.includes_usage:
            yield [call.shape.usage_chunk(self._usage(call, num_tokens))]

    def _usage(self, call: Call, num_tokens: int) -> dict[str, int]:
        return usage_shape(sum(len(request.prompt_ids) for request in call.requests), num_tokens)

    def _model_shape(self, model_id: str, parent: str | None) -> dict[str, Any]:
        return {"id": model_id, "object": "model", "created": self._created, "owned_by": "loray", "root": model_id, "parent": parent}


def make_router(service: Service) -> APIRouter:
    api = OpenAIApi(service)
    router = APIRouter(prefix="/v1", tags=["openai"])

    @router.post("/chat/completions", response_model=None)
    async def chat_completions(body: ChatBody) -> Response:
        """The next message of a conversation."""
        return await api.answer(await api.chat_call(body))

    @router.post("/completions", response_model=None)
    async def completions(body: CompletionBody) -> Response:
        """The continuation of one or several prompts."""
        return await api.answer(await api.completion_call(body))

    @router.post("/embeddings", response_model=None)
    async def embeddings(body: EmbeddingBody) -> Response:
        """One or several texts as vectors: their final hidden states, pooled."""
        return JSONResponse(await api.embeddings(body))

    @router.get("/models")
    async def models() -> dict[str, Any]:
        """The base model and every adapter that can be used now."""
        return {"object": "list", "data": await api.models()}

    @router.get("/models/{model_id:path}")
    async def model(model_id: str) -> dict[str, Any]:
        return await api.model(model_id)

    return router
