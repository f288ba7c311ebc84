"""The parts of a chat request that say what was said: messages, tools, and the choice among them. Runs nothing."""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, ValidationInfo, field_validator

from loray.deployments.errors import ToolError
from loray.deployments.native_request import Body, Text, json_text
from loray.deployments.tool_format import parsed_arguments

MAX_TOOLS = 128  # OpenAI's
MAX_PARTS = 1024  # of one message
NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}


def checked_json(value: dict[str, Any]) -> dict[str, Any]:
    json_text(value)
    return value


JsonObject = Annotated[dict[str, Any], AfterValidator(checked_json)]
Name = Annotated[str, Field(pattern="^[a-zA-Z0-9_-]{1,64}$")]


class TextPart(Body):
    type: Literal["text"]
    text: Text


class CalledFunction(Body):
    name: Name
    arguments: Text
    """A JSON object, written as text."""
    parsed_arguments: Any = None
    """What OpenAI's client made of them; not used."""


class ToolCall(Body):
    """One that the assistant made earlier."""

    id: Text
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None
    """Its place among the calls of a streamed answer; not used."""

    def for_template(self) -> dict[str, Any]:
        function = {"name": self.function.name, "arguments": parsed_arguments(self.function.arguments)}
        return {"id": self.id, "type": "function", "function": function}


class Message(Body):
    """Assistant messages may be sent back as they came, with their empty fields and with those that OpenAI's client adds."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    tool_calls: list[ToolCall] | None = Field(default=None, max_length=MAX_TOOLS, fail_fast=True)
    content: Text | Annotated[list[TextPart], Field(fail_fast=True)] | None = Field(default=None, validate_default=True)
    name: Text | None = None
    tool_call_id: Text | None = Field(default=None, validate_default=True)
    refusal: None = None
    annotations: list[Any] | None = Field(default=None, max_length=0, fail_fast=True)
    audio: None = None
    function_call: None = None
    parsed: Any = None

    @field_validator("tool_calls")
    @classmethod
    def _only_the_assistant_calls(cls, calls: list[ToolCall] | None, info: ValidationInfo) -> list[ToolCall] | None:
        if calls and info.data.get("role", "assistant") != "assistant":
            raise ValueError("only the assistant's messages have them")
        return calls

    @field_validator("content", mode="before")
    @classmethod
    def _few_parts(cls, content: Any) -> Any:
        if isinstance(content, list) and len(content) > MAX_PARTS:
            raise ValueError(f"has {len(content)} parts, more than {MAX_PARTS}")
        return content

    @field_validator("content")
    @classmethod
    def _nothing_is_said_only_with_calls(cls, content: Any, info: ValidationInfo) -> Any:
        if content is None and not info.data.get("tool_calls", "refused already"):
            raise ValueError("must be a text or a list of text parts")
        return content

    @field_validator("tool_call_id")
    @classmethod
    def _a_result_says_of_what(cls, call_id: str | None, info: ValidationInfo) -> str | None:
        if (info.data.get("role") == "tool") != (call_id is not None):
            raise ValueError("messages of the role tool have one, and no others")
        return call_id

    def for_template(self) -> dict[str, Any]:
        content = "".join(part.text for part in self.content) if isinstance(self.content, list) else self.content or ""
        message: dict[str, Any] = {"role": self.role, "content": content}
        if self.name:
            message["name"] = self.name
        if self.tool_call_id is not None:
            message["tool_call_id"] = self.tool_call_id
        if self.tool_calls:
            message["tool_calls"] = [call.for_template() for call in self.tool_calls]
        return message


class Function(Body):
    name: Name
    description: Text | None = None
    parameters: JsonObject | None = None
    """A JSON schema of an object; none when not given."""
    strict: bool | None = None
    """Calls are valid against the schema in any case."""

    def for_template(self, name: str) -> dict[str, Any]:
        """`name` is the field's."""
        parameters = {"type": "object", **(NO_ARGUMENTS if self.parameters is None else self.parameters)}
        if parameters["type"] != "object":
            raise ToolError(f"{name}.parameters: the schema must be of an object", f"{name}.parameters")
        description = {} if self.description is None else {"description": self.description}
        return {"name": self.name, **description, "parameters": parameters}


class Tool(Body):
    type: Literal["function"]
    function: Function


class NamedFunction(Body):
    name: Text


class NamedTool(Body):
    type: Literal["function"]
    function: NamedFunction
