"""The body of a native request, as http clients of LoRAX write it. Refuses what is not built; runs nothing."""

from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator

from loray.deployments.error_shapes import invalid_request
from loray.deployments.errors import InvalidRequest
from loray.deployments.request import SOURCES, AdapterRef, MajoritySign, MergeRecipe, MergeStrategy
from loray.deployments.service import MAX_SEED, MAX_STOPS, random_seed
from loray.models.step import MAX_TOP_K, Sampling

MAX_MERGED = 16  # adapters in one merge


def whole_characters(text: str) -> str:
    """JSON can spell half a surrogate pair, which is no text: no tokenizer, header or wire takes it."""
    if not text.isascii() and any("\ud800" <= character <= "\udfff" for character in text):
        raise ValueError("has half of a surrogate pair, which is no character")
    return text


Text = Annotated[str, AfterValidator(whole_characters)]
StopString = Annotated[Text, Field(min_length=1)]
AdapterId = Annotated[Text, Field(min_length=1)]


class Body(BaseModel):
    """Wrong types and unknown fields are errors, never coerced or dropped. null is the default everywhere."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True, frozen=True)


B = TypeVar("B", bound=Body)


class MergedAdapters(Body):
    """Several adapters as one. lorax-client always sends a density, so linear takes one too; it uses none."""

    ids: list[AdapterId] = Field(min_length=1, max_length=MAX_MERGED)
    weights: list[float] | None = None
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


class Parameters(Body):
    adapter_id: Text | None = None
    """Empty or null: the base model."""
    adapter_source: Text | None = None
    api_token: Text | None = None
    """For adapters that not everybody may read."""
    do_sample: bool | None = None
    """Implied by a temperature other than 0 and 1, by top_k and by top_p."""
    temperature: float | None = Field(default=None, ge=0)
    """0 is greedy."""
    top_k: int | None = Field(default=None, gt=0, le=MAX_TOP_K)
    top_p: float | None = Field(default=None, gt=0, le=1)
    seed: int | None = Field(default=None, ge=0, le=MAX_SEED)
    """Drawn at random, and reported in the details, when not given."""
    max_new_tokens: int | None = Field(default=None, ge=1)
    """What fits into max_total_tokens, when not given."""
    ignore_eos_token: bool | None = None
    return_full_text: bool | None = None
    """Put the prompt before the text."""
    details: bool | None = None
    stop: list[StopString] | None = Field(default=None, max_length=MAX_STOPS)
    truncate: int | None = Field(default=None, ge=1)
    """Keep the last so many tokens of the prompt."""
    best_of: int | None = Field(default=None, ge=1)
    typical_p: float | None = Field(default=None, gt=0, lt=1)
    repetition_penalty: float | None = Field(default=None, gt=0)
    frequency_penalty: float | None = Field(default=None, ge=-2, le=2)
    presence_penalty: float | None = Field(default=None, ge=-2, le=2)
    watermark: bool | None = None
    decoder_input_details: bool | None = None
    return_k_alternatives: int | None = Field(default=None, ge=0)
    merged_adapters: MergedAdapters | None = None
    """Not together with adapter_id."""
    response_format: dict[str, Any] | None = None

    @property
    def is_sampling(self) -> bool:
        if self.temperature == 0:
            return False
        return bool(self.do_sample) or self.temperature not in (None, 1) or self.top_k is not None or self.top_p is not None


# Fields of the contract that are not built yet, with the value that asks for nothing.
NOT_BUILT: dict[str, Any] = {
    "best_of": 1,
    "typical_p": None,
    "repetition_penalty": 1,
    "frequency_penalty": 0,
    "presence_penalty": 0,
    "watermark": False,
    "decoder_input_details": False,
    "return_k_alternatives": 0,
    "response_format": {"type": "text"},
}


class GenerateBody(Body):
    inputs: Text
    parameters: Parameters | None = None
    stream: bool | None = None


class EmbedParameters(Body):
    adapter_id: Text | None = None
    """Empty or null: the base model."""
    adapter_source: Text | None = None
    api_token: Text | None = None
    """For adapters that not everybody may read."""
    merged_adapters: MergedAdapters | None = None
    """Not together with adapter_id."""


class EmbedBody(Body):
    inputs: Text
    parameters: EmbedParameters | None = None


class TokenizeBody(Body):
    inputs: Text
    add_special_tokens: bool | None = None


def parse(kind: type[B], body: Any) -> B:
    """For callers that bring a dict."""
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        raise invalid_request(error.errors()) from None


def refuse_not_built(model: BaseModel, not_built: dict[str, Any]) -> None:
    """A parameter that would be ignored is worse than an error."""
    for name, nothing in not_built.items():
        value = getattr(model, name)
        if value is not None and value != nothing:
            raise InvalidRequest(f"{name}: not supported by this server yet", name)


def adapter_ref(
    adapter_id: str | None, source: str | None, api_token: str | None, merged: MergedAdapters | None = None
) -> AdapterRef | None:
    """None for the base model. What is wrong with the source is said even then."""
    if source not in (None, *SOURCES):
        raise InvalidRequest(f"adapter_source: {source!r} is not supported, only {', '.join(SOURCES)}", "adapter_source")
    if adapter_id and merged:
        raise InvalidRequest("adapter_id and merged_adapters: at most one of them can be given", "merged_adapters")
    recipe = merged.recipe if merged else None
    name = f"merge of {', '.join(recipe.adapter_ids)}" if recipe else adapter_id
    return AdapterRef(adapter_id=name, source=source or "", api_token=api_token or "", merge=recipe) if name else None


def sampling_of(parameters: Parameters) -> Sampling:
    if not parameters.is_sampling:
        return Sampling()
    return Sampling(
        temperature=1.0 if parameters.temperature is None else parameters.temperature,
        top_k=parameters.top_k or 0,
        top_p=1.0 if parameters.top_p is None else parameters.top_p,
        seed=random_seed() if parameters.seed is None else parameters.seed,
    )
