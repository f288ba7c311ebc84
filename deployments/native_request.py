"""The body of a native request, as http clients of LoRAX write it, and what it asks of the model. Runs nothing."""

import json
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator, model_validator

from loray.deployments.error_shapes import MAX_ERRORS, invalid_request
from loray.deployments.errors import InvalidRequest
from loray.deployments.grammars import GrammarKind, GrammarSpec
from loray.deployments.request import MERGE_OF, SOURCES, AdapterRef, MajoritySign, MergeRecipe, MergeStrategy
from loray.deployments.service import MAX_ALTERNATIVES, MAX_SEED, MAX_STOPS, random_seed
from loray.models.step import MAX_TOP_K, Sampling

MAX_MERGED = 16  # adapters in one merge
MAX_SCHEMA_PARTS = 50_000  # values in it, at all depths


def whole_characters(text: str) -> str:
    """JSON can spell half a surrogate pair, which is no text: no tokenizer, header or wire takes it."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("has half of a surrogate pair, which is no character") from None
    return text


Text = Annotated[str, AfterValidator(whole_characters)]
StopString = Annotated[str, Field(min_length=1), AfterValidator(whole_characters)]
AdapterId = StopString


class Body(BaseModel):
    """Wrong types and unknown fields are errors, never coerced or dropped. null is the default everywhere.

    An error costs a thousand times what the byte did that makes it: lists are to end at their first (fail_fast)."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True, frozen=True)

    @model_validator(mode="before")
    @classmethod
    def few_unknown_fields(cls, body: Any) -> Any:
        """The first ones stand for all."""
        if not isinstance(body, dict) or len(body) <= len(cls.model_fields) + MAX_ERRORS:
            return body
        names = {field.alias or name for name, field in cls.model_fields.items()}
        unknown = [name for name in body if name not in names]
        return {name: value for name, value in body.items() if name in names} | {name: body[name] for name in unknown[:MAX_ERRORS]}


B = TypeVar("B", bound=Body)


class MergedAdapters(Body):
    """Several adapters as one. lorax-client always sends a density, so linear takes one too; it uses none."""

    ids: list[AdapterId] = Field(min_length=1, max_length=MAX_MERGED, fail_fast=True)
    weights: list[float] | None = Field(default=None, fail_fast=True)
    """One for each id; each is 1 when not given."""
    merge_strategy: MergeStrategy | None = None
    """linear, when not given."""
    density: float | None = Field(default=None, ge=0, le=1, validate_default=True)
    """Share of the values that ties and dare keep; they need one above 0."""
    majority_sign_method: MajoritySign | None = None
    """How ties and dare_ties elect a sign: total, when not given."""

    @field_validator("weights")
    @classmethod
    def one_weight_for_each_id(cls, weights: list[float] | None, info: ValidationInfo) -> list[float] | None:
        ids: list[str] | None = info.data.get("ids")  # None when they are wrong themselves
        if ids and weights is not None and len(weights) != len(ids):
            raise ValueError(f"there are {len(weights)} for {len(ids)} ids")
        return weights

    @field_validator("density")
    @classmethod
    def pruning_needs_a_density(cls, density: float | None, info: ValidationInfo) -> float | None:
        strategy = info.data.get("merge_strategy") or "linear"
        if strategy != "linear" and not density:
            raise ValueError(f"{strategy} needs one above 0")
        return density

    @property
    def recipe(self) -> MergeRecipe:
        """What a strategy does not use has its default, so that equal merges are equal recipes."""
        strategy = self.merge_strategy or "linear"
        return MergeRecipe(
            adapter_ids=tuple(self.ids),
            weights=tuple(self.weights or [1.0] * len(self.ids)),
            strategy=strategy,
            density=1.0 if strategy == "linear" else self.density or 1.0,
            majority_sign=(strategy.endswith("ties") and self.majority_sign_method) or "total",
        )


def json_text(schema: dict[str, Any]) -> str:
    """What came as JSON, in JSON again: what only Python's parser takes for JSON is refused."""
    _check_size(schema)
    try:
        return whole_characters(json.dumps(schema, ensure_ascii=False, allow_nan=False))
    except RecursionError:
        raise ValueError("is nested too deeply") from None


def _check_size(value: Any) -> None:
    """Before anything looks at all of it."""
    parts, num_parts = [value], 0
    while parts:
        part = parts.pop()
        children = part.values() if isinstance(part, dict) else part if isinstance(part, list) else ()
        num_parts += len(children)
        if num_parts > MAX_SCHEMA_PARTS:
            raise ValueError(f"has more than {MAX_SCHEMA_PARTS} values")
        parts.extend(children)


class ResponseFormat(Body):
    """What the text must look like. lorax-client knows only json_object, always with a schema."""

    type: Literal["text", "json_object", "json_schema", "regex", "ebnf"]
    json_schema: dict[str, Any] | None = Field(default=None, alias="schema")
    """Of json_schema, and of json_object if not any object will do."""
    regex: Text | None = Field(default=None, min_length=1)
    """Of regex."""
    grammar: Text | None = Field(default=None, min_length=1)
    """Of ebnf."""

    @field_validator("json_schema")
    @classmethod
    def schema_is_json(cls, schema: dict[str, Any] | None) -> dict[str, Any] | None:
        if schema is not None:
            json_text(schema)
        return schema

    @model_validator(mode="after")
    def has_what_its_type_needs(self) -> "ResponseFormat":
        given = {"schema": self.json_schema, "regex": self.regex, "grammar": self.grammar}
        needed = {"json_schema": "schema", "regex": "regex", "ebnf": "grammar"}.get(self.type)
        if needed and given[needed] is None:
            raise ValueError(f"{self.type} needs a {needed}")
        for name, value in given.items():
            if value is not None and name != needed and (self.type, name) != ("json_object", "schema"):
                raise ValueError(f"{self.type} takes no {name}")
        return self

    @property
    def spec(self) -> GrammarSpec | None:
        """None for any text."""
        if self.type == "text":
            return None
        if self.type == "json_object" and not self.json_schema:
            return GrammarSpec("json_object")
        kind: GrammarKind = "json_schema" if self.type == "json_object" else self.type
        return GrammarSpec(kind, self.regex or self.grammar or json_text(self.json_schema or {}))


class Parameters(Body):
    adapter_id: Text | None = None
    """Empty or null: the base model."""
    adapter_source: Text | None = None
    api_token: Text | None = None
    """For adapters that not everybody may read; the bearer of the Authorization header, when not given."""
    do_sample: bool | None = None
    """Implied by a temperature other than 0 and 1, by top_k, by top_p and by typical_p."""
    temperature: float | None = Field(default=None, ge=0)
    """0 is greedy."""
    top_k: int | None = Field(default=None, gt=0, le=MAX_TOP_K)
    top_p: float | None = Field(default=None, gt=0, le=1)
    seed: int | None = Field(default=None, ge=0, le=MAX_SEED)
    """Drawn at random, and reported in the details, when not given."""
    max_new_tokens: int | None = Field(default=None, ge=1)
    """What fits into max_total_tokens, when not given."""
    ignore_eos_token: bool | None = None
    """A text with a response_format ends where the format does all the same."""
    return_full_text: bool | None = None
    """Put the prompt before the text."""
    details: bool | None = None
    stop: list[StopString] | None = Field(default=None, max_length=MAX_STOPS, fail_fast=True)
    truncate: int | None = Field(default=None, ge=1)
    """Keep the last so many tokens of the prompt."""
    best_of: int | None = Field(default=None, ge=1)
    """Try so many sequences at once and answer the one whose tokens are the most probable on average."""
    typical_p: float | None = Field(default=None, gt=0, lt=1)
    repetition_penalty: float | None = Field(default=None, gt=0)
    """Over prompt and output; 1 is none."""
    frequency_penalty: float | None = Field(default=None, ge=-2, le=2)
    presence_penalty: float | None = Field(default=None, ge=-2, le=2)
    watermark: bool | None = None
    decoder_input_details: bool | None = None
    """Tell the prompt's tokens and their log-probabilities; implies details."""
    return_k_alternatives: int | None = Field(default=None, ge=0, le=MAX_ALTERNATIVES)
    """Tell so many of the most probable tokens at each new one's place."""
    merged_adapters: MergedAdapters | None = None
    """Not together with adapter_id."""
    response_format: ResponseFormat | None = None

    @property
    def is_sampling(self) -> bool:
        if self.temperature == 0:
            return False
        warpers = (self.top_k, self.top_p, self.typical_p)
        return bool(self.do_sample) or self.temperature not in (None, 1) or any(warper is not None for warper in warpers)

    @property
    def num_sequences(self) -> int:
        return self.best_of or 1


class GenerateBody(Body):
    inputs: Text
    parameters: Parameters | None = None
    stream: bool | None = None


class EmbedParameters(Body):
    adapter_id: Text | None = None
    """Empty or null: the base model."""
    adapter_source: Text | None = None
    api_token: Text | None = None
    """For adapters that not everybody may read; the bearer of the Authorization header, when not given."""
    merged_adapters: MergedAdapters | None = None
    """Not together with adapter_id."""


class EmbedBody(Body):
    inputs: Text
    parameters: EmbedParameters | None = None
    stream: Literal[False] | None = None
    """lorax-client says of everything that it shall not be streamed."""


class ClassifyBatchBody(Body):
    inputs: list[Text] = Field(min_length=1, fail_fast=True)
    parameters: EmbedParameters | None = None
    stream: Literal[False] | None = None


class TokenizeBody(Body):
    inputs: Text
    add_special_tokens: bool | None = None


def parse(kind: type[B], body: Any) -> B:
    """For callers that bring a dict."""
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        raise invalid_request(error.errors()) from None


def adapter_ref(
    adapter_id: str | None, source: str | None, api_token: str | None, merged: MergedAdapters | None = None
) -> AdapterRef | None:
    """None for the base model. What is wrong with the source is said even then."""
    if source not in (None, *SOURCES):
        raise InvalidRequest(f"adapter_source: {source!r} is not supported, only {', '.join(SOURCES)}", "adapter_source")
    if adapter_id and merged:
        raise InvalidRequest("adapter_id and merged_adapters: at most one of them can be given", "merged_adapters")
    recipe = merged.recipe if merged else None
    name = f"{MERGE_OF}{', '.join(recipe.adapter_ids)}" if recipe else adapter_id
    return AdapterRef(adapter_id=name, source=source or "", api_token=api_token or "", merge=recipe) if name else None


def sampling_of(parameters: Parameters, grammar: bytes) -> Sampling:
    """`grammar` is the compiled response_format, empty for none."""
    is_sampling = parameters.is_sampling
    return Sampling(
        temperature=(1.0 if parameters.temperature is None else parameters.temperature) if is_sampling else 0.0,
        top_k=(is_sampling and parameters.top_k) or 0,
        top_p=(is_sampling and parameters.top_p) or 1.0,
        typical_p=(is_sampling and parameters.typical_p) or 1.0,
        seed=(random_seed() if parameters.seed is None else parameters.seed) if is_sampling else 0,
        repetition_penalty=parameters.repetition_penalty or 1.0,
        frequency_penalty=parameters.frequency_penalty or 0.0,
        presence_penalty=parameters.presence_penalty or 0.0,
        watermark=bool(parameters.watermark),
        grammar=grammar,
        num_alternatives=parameters.return_k_alternatives or 0,
    )


def check_best_of(parameters: Parameters, max_best_of: int) -> None:
    num = parameters.num_sequences
    if num > max_best_of:
        raise InvalidRequest(f"best_of: {num} is more than this server's max_best_of, {max_best_of}", "best_of")
    if num > 1 and not parameters.is_sampling:
        raise InvalidRequest("best_of: without sampling all sequences are the same; set do_sample or a temperature", "best_of")
    if num > 1 and parameters.seed is not None:
        raise InvalidRequest("seed: must not be set when best_of is more than 1", "seed")


def check_streamed(parameters: Parameters) -> None:
    if parameters.num_sequences > 1:
        raise InvalidRequest("best_of: more than 1 can not be streamed", "best_of")
    if parameters.decoder_input_details:
        raise InvalidRequest("decoder_input_details: can not be streamed", "decoder_input_details")
