"""The OpenAI API: chat and text completions, embeddings, and the list of models. Shapes are in openai_shapes; knows nothing of Ray."""

import asyncio
import hashlib
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Response

from loray.deployments import request_log, sse
from loray.deployments.answer_plan import RESPONSE_FORMAT, AnswerPlan, answer_plan
from loray.deployments.caller_token import caller_token
from loray.deployments.chat_template import ChatTemplates
from loray.deployments.completion_plan import completion_plan
from loray.deployments.error_docs import OPENAI_ENTRY, OPENAI_LIST, OPENAI_MODEL
from loray.deployments.error_shapes import openai_body
from loray.deployments.errors import AdapterNotFound, InvalidRequest, TemplateOutdated, ToolError
from loray.deployments.generation import OFF_LOOP_TOKENS, Piece, PromptToken, Timing
from loray.deployments.json_answer import json_answer
from loray.deployments.json_route import JsonRoute
from loray.deployments.merge import merge
from loray.deployments.off_loop import in_turn_if, off_loop_if
from loray.deployments.openai_choices import ChatChoice, Choice, CompletionChoice
from loray.deployments.openai_docs import CHAT_DOCS, COMPLETION_DOCS, EmbeddingList, Model, ModelList
from loray.deployments.openai_embedding_request import EmbeddingBody
from loray.deployments.openai_request import ChatBody, CompletionBody, OpenAIBody
from loray.deployments.openai_shapes import ResponseShape, Usage, embeddings_shape
from loray.deployments.prompt_texts import check_text, prompt_ids
from loray.deployments.request import GenerationRequest
from loray.deployments.service import FieldNames, Service, Wanted
from loray.deployments.stop_strings import Shelter
from loray.deployments.tokenizer import OFF_LOOP_MESSAGES

CHAT_NAMES = FieldNames(prompt="messages", max_new_tokens="max_tokens")
OFF_LOOP_FLOATS = 16_384  # about 1 ms of writing
MAX_AT_ONCE = 64  # inputs or sequences of one request: it must not fill the driver's queue alone
MAX_REWRITES = 4  # of a chat's prompt: with two versions on two replicas each is right with one in two
HUB_TOKEN = "hf_"  # how tokens begin; other values of the header are other services' keys, or nothing, and go nowhere

Vectors = AsyncGenerator[tuple[int, list[float]], None]
Pieces = AsyncGenerator[tuple[int, Piece, Sequence[PromptToken]], None]  # of the choice with that index; with its first: the prompt


@dataclass(frozen=True, slots=True)
class Call:
    """A request that passed validation: one generation for each choice, `num_sequences` of them for each prompt."""

    body: OpenAIBody
    requests: list[GenerationRequest]
    choices: Sequence[Choice]
    shape: ResponseShape
    usage: Usage
    received: float  # seconds of the monotonic clock
    turns: asyncio.Semaphore
    stops: list[str]
    shelter: Shelter | None = None  # where those don't count


class OpenAIApi:
    """A `token` is the caller's own, for adapters, where the body has none."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._created = int(time.time())
        self._templates = ChatTemplates(service.tokenizer, service.backend, service.args.model.chat_template)
        model = service.args.model
        served = f"{model.id}\n{model.revision}\n{service.info()['model_dtype']}\n{service.info()['version']}"
        self._fingerprint = f"fp_{hashlib.blake2b(served.encode(), digest_size=5).hexdigest()}"

    async def chat(self, body: ChatBody, token: str) -> Response:
        """An adapter that was replaced since its template was read has the prompt written anew; often, where replicas hold two versions."""
        for _ in range(MAX_REWRITES):
            try:
                return await self.answer(await self.chat_call(body, token))
            except TemplateOutdated:
                self._templates.forget(body.adapter(self._service.model_id, token))
        return await self.answer(await self.chat_call(body, token))

    async def chat_call(self, body: ChatBody, token: str) -> Call:
        received = time.monotonic()
        self._check_choices(body)
        plan = answer_plan(body)
        if plan.tools:
            self._check_stop_tokens(body)
        adapter = body.adapter(self._service.model_id, token)
        has_calls = any(message.tool_calls for message in body.messages)
        messages = await off_loop_if(
            has_calls or len(body.messages) > OFF_LOOP_MESSAGES,
            lambda: [message.for_template() for message in body.messages],
        )
        async with self._service.in_time(received):
            prompt = await self._templates.prompt(messages, plan.tools, adapter)
            check_text(self._service, prompt.text, CHAT_NAMES.prompt)
            token_ids = await self._service.tokenizer.encode_rendered(prompt.text)
            grammar = await self._grammar(plan)
        names = CHAT_NAMES._replace(grammar=plan.param, max_new_tokens=body.max_tokens_field)
        requests = []
        for seed in body.seeds():
            wanted = Wanted(
                sampling=body.sampling(grammar, seed),
                adapter=adapter,
                max_new_tokens=body.max_new_tokens,
                ignore_eos=bool(body.ignore_eos),
                stop_token_ids=tuple(body.stop_token_ids or ()),
                template=prompt.template,
            )
            requests.append(self._service.request(token_ids, wanted, names))
        choices = [ChatChoice(index, bool(body.logprobs), plan.parser()) for index in range(len(requests))]
        shape = ResponseShape("chat", body.model, self._fingerprint)
        stops = [] if plan.is_forced else body.stops
        return Call(body, requests, choices, shape, Usage(len(token_ids)), received, self._turns(), stops, plan.shelter)

    async def _grammar(self, plan: AnswerPlan) -> bytes:
        try:
            return await self._service.grammars.compile(plan.grammar, plan.param) if plan.grammar else b""
        except InvalidRequest as error:
            if not plan.tools:
                raise
            if plan.has_format and error.message.startswith(f"{plan.param}: {RESPONSE_FORMAT}: "):  # its schema is a part of theirs
                raise InvalidRequest(error.message.removeprefix(f"{plan.param}: "), RESPONSE_FORMAT) from None
            raise ToolError(error.message, error.param) from None

    async def completion_call(self, body: CompletionBody, token: str) -> Call:
        received = time.monotonic()
        self._check_choices(body)
        body.check()
        if body.max_tokens == 0:
            request_log.set_echo_only()
        plans = await completion_plan(self._service, body, token, received)
        requests = [request for plan in plans for request in plan.requests]
        choices: list[CompletionChoice] = []
        for plan in plans:
            for _ in plan.requests:
                choice = CompletionChoice(len(choices), body.logprobs is not None, plan.echo, plan.places, body.max_tokens == 0)
                choices.append(choice)
        shape = ResponseShape("completion", body.model, self._fingerprint)
        usage = Usage(sum(plan.num_tokens for plan in plans))
        return Call(body, requests, choices, shape, usage, received, self._turns(), body.stops)

    async def answer(self, call: Call) -> Response:
        if call.body.stream:
            keep_alive_s = self._service.args.limits.keep_alive_s
            return await sse.event_stream(self._stream(call), dict, openai_body, sse.DONE, keep_alive_s)
        async with aclosing(self._pieces(call)) as pieces:
            async for index, piece, prompt in pieces:
                await added(call.choices[index], piece, prompt)
        call.usage.num_tokens = sum(choice.num_tokens for choice in call.choices)
        is_large = sum(choice.num_told for choice in call.choices) > OFF_LOOP_TOKENS
        return await json_answer(lambda: call.shape.whole([choice.whole() for choice in best(call)], call.usage), is_large)

    async def embeddings(self, body: EmbeddingBody, token: str) -> Response:
        received = time.monotonic()
        adapter = body.adapter(self._service.model_id, token)
        inputs = body.inputs()
        async with self._service.in_time(received):
            all_ids = await prompt_ids(self._service, list(inputs.values()), list(inputs))
        requests = {
            name: self._service.embedding_request(token_ids, adapter, name) for name, token_ids in zip(inputs, all_ids, strict=True)
        }
        turns = self._turns()
        sources = [self._embedding(index, request, name, Timing(received), turns) for index, (name, request) in enumerate(requests.items())]
        async with aclosing(merge(sources)) as vectors:
            by_index = {index: vector async for index, vector in vectors}
        ordered = [by_index[index] for index in range(len(sources))]
        num_tokens = sum(map(len, all_ids))
        is_large = sum(map(len, ordered)) > OFF_LOOP_FLOATS
        return await json_answer(lambda: embeddings_shape(body.model, ordered, body.encoding_format == "base64", num_tokens), is_large)

    async def models(self) -> list[dict[str, Any]]:
        base = self._service.model_id
        adapters = [name for name in await self._service.backend.adapters() if not f"{name}:".startswith(f"{base}:")]  # those mean the base
        return [self._model_shape(base, None)] + [self._model_shape(name, base) for name in adapters]

    async def model(self, model_id: str) -> dict[str, Any]:
        adapter_id = model_id.removeprefix(f"{self._service.model_id}:")
        for shape in await self.models():
            if shape["id"] in (model_id, adapter_id):
                return {**shape, "id": model_id}
        raise AdapterNotFound(f"the model {model_id!r} does not exist")

    def _check_choices(self, body: OpenAIBody) -> None:
        most = self._service.args.limits.max_choices
        for name, num in {"n": body.num_choices, "best_of": body.num_sequences}.items():
            if num > most:
                raise InvalidRequest(f"{name}: {num} is more than this server's max_choices, {most}", name)

    def _check_stop_tokens(self, body: ChatBody) -> None:
        """Beside tools: a grammar lets no special token into a call, but any other may be a part of one, which it would cut."""
        for token_id in body.stop_token_ids or []:
            if token_id not in self._service.tokenizer.special_texts:
                raise InvalidRequest(f"stop_token_ids: together with tools only special tokens, which {token_id} is not", "stop_token_ids")

    def _turns(self) -> asyncio.Semaphore:
        args = self._service.args
        return asyncio.Semaphore(min(MAX_AT_ONCE, args.scheduler.max_waiting, args.adapters.max_waiting))

    async def _embedding(self, index: int, request: GenerationRequest, name: str, timing: Timing, turns: asyncio.Semaphore) -> Vectors:
        async with turns:
            vector = await self._service.embed(request, name, timing)
        yield index, vector

    def _pieces(self, call: Call) -> Pieces:
        sources = [self._pieces_of(call, index) for index in range(len(call.requests))]
        return sources[0] if len(sources) == 1 else merge(sources)

    async def _pieces_of(self, call: Call, index: int) -> Pieces:
        request, timing = call.requests[index].resting(bool(call.body.stream) and not call.stops), Timing(call.received)
        async with call.turns, self._service.generation(request, call.stops, timing, call.shelter) as generation:
            is_first = request.wants_prompt_logprobs
            async for piece in generation:
                yield index, piece, await generation.prompt_tokens() if is_first else ()
                is_first = False

    async def _stream(self, call: Call) -> sse.Batches:
        async with aclosing(self._pieces(call)) as pieces:
            async for index, piece, prompt in pieces:
                choice = call.choices[index]
                call.usage.num_tokens -= choice.num_tokens
                parts = await added(choice, piece, prompt)
                call.usage.num_tokens += choice.num_tokens
                if parts:
                    tail = chunk_tail(call)
                    yield [call.shape.chunk([part], **tail) for part in parts]
        if call.body.includes_usage:
            yield [call.shape.chunk([], usage=call.usage.shape())]

    def _model_shape(self, model_id: str, parent: str | None) -> dict[str, Any]:
        return {"id": model_id, "object": "model", "created": self._created, "owned_by": "loray", "root": model_id, "parent": parent}


async def added(choice: Choice, piece: Piece, prompt: Sequence[PromptToken]) -> list[dict[str, Any]]:
    """A long prompt would hold up every other stream."""
    return await in_turn_if(len(prompt) > OFF_LOOP_TOKENS, lambda: choice.add(piece, prompt))


def best(call: Call) -> list[Choice]:
    """The choices that are answered: of each prompt's sequences the most probable, if there are more than asked for."""
    num, of = call.body.num_choices, call.body.num_sequences
    if num == of:
        return list(call.choices)
    chosen: list[Choice] = []
    for start in range(0, len(call.choices), of):
        completions = [choice for choice in call.choices[start : start + of] if isinstance(choice, CompletionChoice)]
        chosen += sorted(completions, key=lambda choice: -choice.mean_logprob)[:num]
    for index, choice in enumerate(chosen):
        choice.index = index
    return chosen


def chunk_tail(call: Call) -> dict[str, dict[str, int] | None]:
    if call.body.repeats_usage:
        return {"usage": call.usage.shape()}
    return {"usage": None} if call.body.includes_usage else {}


def make_router(service: Service) -> APIRouter:
    api = OpenAIApi(service)
    router = APIRouter(prefix="/v1", tags=["openai"], route_class=JsonRoute)
    bearer = caller_token(service.args.api_keys)

    async def hub_token(token: Annotated[str, Depends(bearer)]) -> str:
        return token if token.startswith(HUB_TOKEN) else ""

    Token = Annotated[str, Depends(hub_token)]

    @router.post("/chat/completions", response_model=None, responses={**CHAT_DOCS, **OPENAI_MODEL})
    async def chat_completions(body: ChatBody, token: Token) -> Response:
        """The next message of a conversation."""
        return await api.chat(body, token)

    @router.post("/completions", response_model=None, responses={**COMPLETION_DOCS, **OPENAI_MODEL})
    async def completions(body: CompletionBody, token: Token) -> Response:
        """The continuation of one or several prompts."""
        return await api.answer(await api.completion_call(body, token))

    @router.post("/embeddings", response_model=None, responses={200: {"model": EmbeddingList}, **OPENAI_MODEL})
    async def embeddings(body: EmbeddingBody, token: Token) -> Response:
        """One or several texts as vectors: their final hidden states, pooled."""
        return await api.embeddings(body, token)

    @router.get("/models", response_model=None, responses={200: {"model": ModelList}, **OPENAI_LIST})
    async def models() -> dict[str, Any]:
        """The base model and every adapter that can be used now."""
        return {"object": "list", "data": await api.models()}

    @router.get("/models/{model_id:path}", response_model=None, responses={200: {"model": Model}, **OPENAI_ENTRY})
    async def model(model_id: str) -> dict[str, Any]:
        return await api.model(model_id)

    return router
