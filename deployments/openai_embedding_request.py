"""The body of an OpenAI request for embeddings. Runs nothing."""

from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, ValidatorFunctionWrapHandler, field_validator

from loray.deployments.errors import InvalidRequest
from loray.deployments.native_request import Body, Text, adapter_ref
from loray.deployments.openai_request import Each, NoWish, named_adapter, one_or_several
from loray.deployments.request import AdapterRef

MAX_INPUTS = 2048  # OpenAI's


class EmbeddingBody(Body):
    model: Text
    """The base model's id, an adapter's, or `base:adapter`."""
    input: Text | Each[int] | Each[Text] | Each[Each[int]]
    """One text or its token ids, or a list of them."""
    encoding_format: Literal["float", "base64"] | None = None
    """float when not given; base64 is of little-endian float32."""
    dimensions: Annotated[int | None, NoWish] = Field(default=None, ge=1)
    user: Text | None = None
    """Accepted; it says who asks and changes no answer."""
    adapter_source: Text | None = None
    api_token: Text | None = None

    @field_validator("input", mode="wrap")
    @classmethod
    def _say_what_it_takes(cls, value: Any, validate: ValidatorFunctionWrapHandler) -> Any:
        """Four branches fail in four ways, which together tell nothing."""
        if isinstance(value, list) and len(value) > MAX_INPUTS and not isinstance(value[0], int):
            raise ValueError(f"has {len(value)} items, more than {MAX_INPUTS}")
        try:
            return validate(value)
        except ValidationError:
            raise ValueError(
                "must be a text of whole characters, its token ids, or a list of such texts or of lists of token ids"
            ) from None

    def adapter(self, base: str, token: str) -> AdapterRef | None:
        """`token` is the caller's own, where the body has none."""
        return adapter_ref(named_adapter(self.model, base), self.adapter_source, token if self.api_token is None else self.api_token)

    def inputs(self) -> dict[str, str | list[int]]:
        """By the names that errors call them."""
        inputs = one_or_several(self.input)
        if not inputs:
            raise InvalidRequest("input: must have at least one item", "input")
        return {f"input.{index}" if len(inputs) > 1 else "input": item for index, item in enumerate(inputs)}
