"""The bodies of OpenAI requests. Refuses what is not built; runs nothing."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, ValidatorFunctionWrapHandler, field_validator

from loray.deployments.errors import AdapterNotFound, InvalidRequest
from loray.deployments.native_request import Body, StopString, Text, adapter_ref, refuse_not_built
from loray.deployments.request import AdapterRef
from loray.deployments.service import MAX_SEED, MAX_STOPS, random_seed
from loray.models.step import MAX_TOP_K, Sampling

MAX_PROMPTS = 128  # in one completions request
MAX_INPUTS = 2048  # in one embeddings request; OpenAI's
DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's

TokenIds = Annotated[list[int], Field(min_length=1)]
Prompts = Annotated[list[Text] | list[TokenIds], Field(min_length=1, max_length=MAX_PROMPTS)]


def named_adapter(model: str, base: str) -> str:
    """What a `model` field names: "" for the base model."""
    if model == base:
        return ""
    name = model.removeprefix(f"{base}:")
    if not name:
        raise AdapterNotFound(f"the model {model!r} does not exist")
    return name


class StreamOptions(Body):
    include_usage: bool | None = None


class TextPart(Body):
    type: Literal["text"]
    text: Text


class Message(Body):
    """Assistant messages may be sent back as they came, with their empty fields."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Text | list[TextPart]
    name: Text | None = None
    refusal: None = None
    annotations: list[Any] | None = Field(default=None, max_length=0)
    audio: None = None
    function_call: None = None
    tool_calls: None = None

    def for_template(self) -> dict[str, str]:
        content = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return {"role": self.role, "content": content} | ({"name": self.name} if self.name else {})


class OpenAIBody(Body):
    """What chat and completions share."""

    model: Text
    """The base model's id, an adapter's, or `base:adapter`."""
    temperature: float | None = Field(default=None, ge=0, le=2)
    """1 when not given; 0 is greedy."""
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, gt=0, le=MAX_TOP_K)
    """Not OpenAI's."""
    max_tokens: int | None = Field(default=None, ge=1)
    stop: StopString | Annotated[list[StopString], Field(max_length=MAX_STOPS)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    seed: int | None = Field(default=None, ge=-MAX_SEED, le=MAX_SEED)
    ignore_eos: bool | None = None
    """Not OpenAI's."""
    user: Text | None = None
    """Accepted; it says who asks and changes no answer."""
    adapter_source: Text | None = None
    api_token: Text | None = None
    n: int | None = Field(default=None, ge=1)
    presence_penalty: float | None = Field(default=None, ge=-2, le=2)
    frequency_penalty: float | None = Field(default=None, ge=-2, le=2)
    repetition_penalty: float | None = Field(default=None, gt=0)
    logit_bias: dict[str, float] | None = None

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    @property
    def includes_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    def adapter_id(self, base: str) -> str:
        return named_adapter(self.model, base)

    def adapter(self, base: str) -> AdapterRef | None:
        return adapter_ref(self.adapter_id(base), self.adapter_source, self.api_token)

    def sampling(self) -> Sampling:
        if self.temperature == 0:
            return Sampling()
        return Sampling(
            temperature=1.0 if self.temperature is None else self.temperature,
            top_k=self.top_k or 0,
            top_p=1.0 if self.top_p is None else self.top_p,
            seed=random_seed() if self.seed is None else self.seed % (MAX_SEED + 1),
        )

    def refuse(self, not_built: dict[str, Any]) -> None:
        refuse_not_built(self, {**NOT_BUILT, **not_built})
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("stream_options: only with stream: true", "stream_options")


class ChatBody(OpenAIBody):
    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=20)
    response_format: dict[str, Any] | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None

    @property
    def max_new_tokens(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


class CompletionBody(OpenAIBody):
    prompt: Text | TokenIds | Prompts
    logprobs: int | None = Field(default=None, ge=0, le=5)
    echo: bool | None = None
    suffix: Text | None = None
    best_of: int | None = Field(default=None, ge=1)
    lora_path: Text | None = None
    """The adapter, as an alternative to naming it in `model`."""
    adapter_id_: Text | None = Field(default=None, alias="adapter_id")

    @property
    def prompts(self) -> Sequence[str | list[int]]:
        return one_or_several(self.prompt)

    def adapter_id(self, base: str) -> str:
        named = {super().adapter_id(base), self.lora_path or "", self.adapter_id_ or ""} - {""}
        if len(named) > 1:
            raise InvalidRequest(f"model, lora_path and adapter_id name different adapters: {', '.join(sorted(named))}", "model")
        return named.pop() if named else ""


class EmbeddingBody(Body):
    model: Text
    """The base model's id, an adapter's, or `base:adapter`."""
    input: Text | list[int] | list[Text] | list[list[int]]
    """One text or its token ids, or a list of them."""
    encoding_format: Literal["float", "base64"] | None = None
    """float when not given; base64 is of little-endian float32."""
    dimensions: int | None = Field(default=None, ge=1)
    user: Text | None = None
    """Accepted; it says who asks and changes no answer."""
    adapter_source: Text | None = None
    api_token: Text | None = None

    @field_validator("input", mode="wrap")
    @classmethod
    def _say_what_it_takes(cls, value: Any, validate: ValidatorFunctionWrapHandler) -> Any:
        """Four branches fail in four ways, which together tell nothing."""
        try:
            return validate(value)
        except ValidationError:
            raise ValueError(
                "must be a text of whole characters, its token ids, or a list of such texts or of lists of token ids"
            ) from None

    def adapter(self, base: str) -> AdapterRef | None:
        return adapter_ref(named_adapter(self.model, base), self.adapter_source, self.api_token)

    def inputs(self) -> dict[str, str | list[int]]:
        """By the names that errors call them."""
        inputs = one_or_several(self.input)
        if not inputs:
            raise InvalidRequest("input: must have at least one item", "input")
        if len(inputs) > MAX_INPUTS:
            raise InvalidRequest(f"input: has {len(inputs)} items, more than {MAX_INPUTS}", "input")
        return {f"input.{index}" if len(inputs) > 1 else "input": item for index, item in enumerate(inputs)}

    def refuse(self) -> None:
        refuse_not_built(self, EMBEDDING_NOT_BUILT)


def one_or_several(field: str | Sequence[int] | Sequence[str] | Sequence[list[int]]) -> Sequence[str | list[int]]:
    """Texts or token ids as a list of them, where one alone may stand for a list of one."""
    if isinstance(field, str):
        return [field]
    token_ids = [item for item in field if isinstance(item, int)]
    return [token_ids] if token_ids else [item for item in field if not isinstance(item, int)]


# Fields that are not built yet, with the value that asks for nothing.
NOT_BUILT: dict[str, Any] = {"n": 1, "presence_penalty": 0, "frequency_penalty": 0, "repetition_penalty": 1, "logit_bias": {}}
CHAT_NOT_BUILT: dict[str, Any] = {
    "top_logprobs": 0,
    "response_format": {"type": "text"},
    "tools": [],
    "tool_choice": "none",
    "parallel_tool_calls": True,
}
EMBEDDING_NOT_BUILT: dict[str, Any] = {"dimensions": None}
COMPLETION_NOT_BUILT: dict[str, Any] = {"logprobs": None, "echo": False, "suffix": "", "best_of": 1}
