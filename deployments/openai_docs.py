"""What OpenAPI shows of the OpenAI API's answers. Documentation: the answers themselves are made in openai_choices and openai_shapes."""

from typing import Literal

from pydantic import BaseModel

from loray.deployments.error_docs import Docs
from loray.deployments.native_shapes import event_stream_docs


class TokenLogprob(BaseModel):
    token: str
    logprob: float
    bytes: list[int]


class ContentLogprob(TokenLogprob):
    top_logprobs: list[TokenLogprob]


class ChatLogprobs(BaseModel):
    content: list[ContentLogprob]
    refusal: None


class FunctionCallShape(BaseModel):
    name: str
    arguments: str  # JSON


class ToolCallShape(BaseModel):
    id: str
    type: Literal["function"]
    function: FunctionCallShape


class ChatMessageShape(BaseModel):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    tool_calls: list[ToolCallShape] = []


class ChatChoiceShape(BaseModel):
    index: int
    message: ChatMessageShape
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"]


class UsageShape(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class ChatCompletion(BaseModel):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoiceShape]
    usage: UsageShape


class CompletionLogprobs(BaseModel):
    tokens: list[str]
    token_logprobs: list[float | None]  # None: of a prompt's first
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoiceShape(BaseModel):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"]


class Completion(BaseModel):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoiceShape]
    usage: UsageShape


class EmbeddingShape(BaseModel):
    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingUsage(BaseModel):
    prompt_tokens: int
    total_tokens: int


class EmbeddingList(BaseModel):
    object: Literal["list"]
    data: list[EmbeddingShape]
    model: str
    usage: EmbeddingUsage


class Model(BaseModel):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: str | None


class ModelList(BaseModel):
    object: Literal["list"]
    data: list[Model]


_STREAM = event_stream_docs("With stream: true: chunks, then [DONE].")
CHAT_DOCS: Docs = {200: {"model": ChatCompletion, "content": _STREAM}}
COMPLETION_DOCS: Docs = {200: {"model": Completion, "content": _STREAM}}
