"""The bodies of OpenAI requests, and what they ask of the model. Runs nothing."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeVar, cast

from pydantic import AfterValidator, BeforeValidator, Field, ValidationError, ValidationInfo, ValidatorFunctionWrapHandler, field_validator

from loray.deployments.errors import AdapterNotFound, InvalidRequest
from loray.deployments.native_request import Body, StopString, Text, adapter_ref
from loray.deployments.openai_messages import MAX_TOOLS, Message, NamedTool, Tool
from loray.deployments.request import AdapterRef
from loray.deployments.response_format import AnswerFormat
from loray.deployments.service import MAX_ALTERNATIVES, MAX_SEED, MAX_STOPS, random_seed
from loray.models.step import MAX_TOP_K, Sampling

MAX_MESSAGES = 4096  # of one chat
MAX_PROMPTS = 128  # in one completions request, and sequences of all of them, unless limits.max_choices is more
MAX_COMPLETION_LOGPROBS = 5  # OpenAI's
MAX_BIASES = 1024  # tokens of one logit_bias
MAX_STOP_TOKENS = 128
MAX_METADATA = 16  # OpenAI's
DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's


def not_supported(value: Any) -> Any:
    """For fields that are accepted only as long as they ask for nothing: a wish that is ignored is worse than an error."""
    if value:
        raise ValueError("not supported by this server")
    return value


def little_metadata(value: Any) -> Any:
    """Counts before the values are looked at: each that is wrong would cost as much as an error does."""
    if isinstance(value, dict) and len(value) > MAX_METADATA:
        raise ValueError(f"has {len(value)} entries, more than {MAX_METADATA}")
    return value


def null_only(value: Any) -> None:
    if value is not None:
        raise ValueError("not supported by this server")


T = TypeVar("T")
Each = Annotated[list[T], Field(fail_fast=True)]  # a body has room for millions of wrong items: the first is enough
Prompts = Annotated[Each[T], Field(min_length=1, max_length=MAX_PROMPTS)]
TokenIds = Annotated[Each[int], Field(min_length=1)]
NoWish = AfterValidator(not_supported)
Null = Annotated[None, BeforeValidator(null_only)]  # of clients that send every field


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
    continuous_usage_stats: bool | None = None
    """Not OpenAI's: the usage so far in every chunk."""
    include_obfuscation: Annotated[bool | None, NoWish] = None


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
    min_tokens: int | None = Field(default=None, ge=0)
    """Not OpenAI's: no end before so many, by a stop string neither."""
    stop: StopString | Annotated[Each[StopString], Field(max_length=MAX_STOPS)] | None = None
    stop_token_ids: Each[Annotated[int, Field(ge=0)]] | None = Field(default=None, max_length=MAX_STOP_TOKENS)
    """Not OpenAI's: tokens that end it, beside the model's own."""
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    seed: int | None = Field(default=None, ge=-MAX_SEED, le=MAX_SEED)
    """Of the first choice; each further choice has the next one."""
    ignore_eos: bool | None = None
    """Not OpenAI's."""
    n: int | None = Field(default=None, ge=1)
    """Choices for each prompt."""
    presence_penalty: float | None = Field(default=None, ge=-2, le=2)
    frequency_penalty: float | None = Field(default=None, ge=-2, le=2)
    repetition_penalty: float | None = Field(default=None, gt=0)
    """Not OpenAI's."""
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = None
    """By token id: added to the token's logit; -100 bans it."""
    adapter_source: Text | None = None
    api_token: Text | None = None
    """For adapters that not everybody may read."""
    user: Text | None = None
    """Accepted; it says who asks and changes no answer."""

    @field_validator("stream_options")
    @classmethod
    def _only_of_a_stream(cls, options: StreamOptions | None, info: ValidationInfo) -> StreamOptions | None:
        if options is not None and not info.data.get("stream", True):
            raise ValueError("only with stream: true")
        return options

    @field_validator("logit_bias", mode="before")
    @classmethod
    def _few_and_by_token_id(cls, bias: Any) -> Any:
        token_ids = bias if isinstance(bias, dict) else {}
        if len(token_ids) > MAX_BIASES:
            raise ValueError(f"has {len(token_ids)} tokens, more than {MAX_BIASES}")
        for token_id in token_ids:
            if not (token_id.isascii() and token_id.isdecimal() and len(token_id) < 10):
                raise ValueError(f"{token_id[:20]!r} is not a token id")
        return bias

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    @property
    def includes_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def repeats_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.continuous_usage_stats)

    @property
    def num_choices(self) -> int:
        return self.n or 1

    @property
    def num_sequences(self) -> int:
        """Generated for each prompt."""
        return self.num_choices

    @property
    def num_alternatives(self) -> int:
        """Most probable tokens to report beside each new one."""
        return 0

    @property
    def num_prompt_alternatives(self) -> int:
        """The same, beside each of the prompt."""
        return 0

    def adapter_id(self, base: str) -> str:
        return named_adapter(self.model, base)

    def adapter(self, base: str, token: str) -> AdapterRef | None:
        """`token` is the caller's own, where the body has none."""
        return adapter_ref(self.adapter_id(base), self.adapter_source, token if self.api_token is None else self.api_token)

    def seeds(self) -> list[int]:
        """One for each sequence of a prompt."""
        if self.seed is None:
            return [random_seed() for _ in range(self.num_sequences)]
        return [(self.seed + index) % (MAX_SEED + 1) for index in range(self.num_sequences)]

    def sampling(self, grammar: bytes, seed: int) -> Sampling:
        is_sampling = self.temperature != 0
        return Sampling(
            temperature=1.0 if self.temperature is None else self.temperature,
            top_k=(is_sampling and self.top_k) or 0,
            top_p=(is_sampling and self.top_p) or 1.0,
            seed=seed if is_sampling else 0,
            repetition_penalty=self.repetition_penalty or 1.0,
            frequency_penalty=self.frequency_penalty or 0.0,
            presence_penalty=self.presence_penalty or 0.0,
            logit_bias={int(token_id): bias for token_id, bias in (self.logit_bias or {}).items()},
            min_new_tokens=self.min_tokens or 0,
            grammar=grammar,
            num_alternatives=self.num_alternatives,
            num_prompt_alternatives=self.num_prompt_alternatives,
        )


class ChatBody(OpenAIBody):
    messages: Each[Message] = Field(min_length=1, max_length=MAX_MESSAGES)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_ALTERNATIVES)
    """Needs logprobs."""
    response_format: AnswerFormat | None = None
    tools: Each[Tool] | None = Field(default=None, max_length=MAX_TOOLS)
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    """auto when there are tools."""
    parallel_tool_calls: bool | None = None
    """Whether there may be several calls in one message: true when not given."""
    metadata: Annotated[dict[Text, Text] | None, BeforeValidator(little_metadata)] = Field(default=None, max_length=MAX_METADATA)
    """Accepted like `user`; so are the next three."""
    prompt_cache_key: Text | None = None
    prompt_cache_retention: Literal["in_memory", "24h"] | None = None
    safety_identifier: Text | None = None
    modalities: Each[Literal["text"]] | None = None
    service_tier: Literal["auto", "default"] | None = None
    reasoning_effort: Literal["none"] | None = None
    verbosity: Literal["medium"] | None = None
    store: Annotated[bool | None, NoWish] = None
    audio: Null = None
    function_call: Null = None
    functions: Null = None
    moderation: Null = None
    prediction: Null = None
    prompt_cache_options: Null = None
    web_search_options: Null = None

    @field_validator("top_logprobs")
    @classmethod
    def _needs_logprobs(cls, num: int | None, info: ValidationInfo) -> int | None:
        if num and not info.data.get("logprobs", True):
            raise ValueError("needs logprobs: true")
        return num

    @field_validator("tool_choice", mode="wrap")
    @classmethod
    def _say_what_it_takes(cls, value: Any, validate: ValidatorFunctionWrapHandler) -> Any:
        try:
            return validate(value)
        except ValidationError:
            raise ValueError('must be "none", "auto", "required" or {"type": "function", "function": {"name": …}}') from None

    @property
    def max_new_tokens(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def max_tokens_field(self) -> str:
        """Which of the two says it."""
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"

    @property
    def num_alternatives(self) -> int:
        return self.top_logprobs or 0


class CompletionBody(OpenAIBody):
    prompt: Text | TokenIds | Prompts[Text] | Prompts[TokenIds]
    max_tokens: int | None = Field(default=None, ge=0)
    """16 when not given; 0 is for `echo`."""
    logprobs: int | None = Field(default=None, ge=0, le=MAX_COMPLETION_LOGPROBS)
    echo: bool | None = None
    """Put the prompt before the text."""
    suffix: Annotated[Text | None, NoWish] = None
    best_of: int | None = Field(default=None, ge=1)
    """Generate so many and answer the `n` most probable; not streamed."""
    lora_path: Text | None = None
    """The adapter, as an alternative to naming it in `model`."""
    adapter_id_: Text | None = Field(default=None, alias="adapter_id")

    @property
    def prompts(self) -> Sequence[str | list[int]]:
        return one_or_several(self.prompt)

    @property
    def num_sequences(self) -> int:
        return self.num_choices if self.best_of is None else self.best_of

    @property
    def num_alternatives(self) -> int:
        return self.logprobs or 0

    @property
    def num_prompt_alternatives(self) -> int:
        return self.num_alternatives if self.scores_prompts else 0

    @property
    def scores_prompts(self) -> bool:
        """Whether it wants the log-probabilities of the prompts' tokens."""
        return bool(self.echo) and self.logprobs is not None

    def adapter_id(self, base: str) -> str:
        named = {super().adapter_id(base), self.lora_path or "", self.adapter_id_ or ""} - {""}
        if len(named) > 1:
            raise InvalidRequest(f"model, lora_path and adapter_id name different adapters: {', '.join(sorted(named))}", "model")
        return named.pop() if named else ""

    def check(self) -> None:
        """What no field alone can tell."""
        if self.num_sequences < self.num_choices:
            raise InvalidRequest(f"best_of: must be at least n, {self.num_choices}", "best_of")
        if self.num_sequences > self.num_choices and self.stream:
            raise InvalidRequest("best_of: more than n can't be streamed", "best_of")
        if self.max_tokens == 0 and not self.echo:
            raise InvalidRequest("max_tokens: 0 is only for echo: true", "max_tokens")


def one_or_several(field: str | Sequence[int] | Sequence[str] | Sequence[list[int]]) -> Sequence[str | list[int]]:
    """Texts or token ids as a list of them, where one alone may stand for a list of one."""
    if isinstance(field, str):
        return [field]
    is_one = bool(field) and isinstance(field[0], int)
    return cast("Sequence[str | list[int]]", [field] if is_one else field)
