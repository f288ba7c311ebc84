"""What a chat request lets the model write: any text, a format, calls of tools. Decides; compiles and runs nothing."""

import json
from dataclasses import dataclass
from typing import Any

from loray.deployments.errors import InvalidRequest, ToolError
from loray.deployments.grammars import GrammarSpec
from loray.deployments.openai_messages import NamedTool
from loray.deployments.openai_request import ChatBody
from loray.deployments.stop_strings import Shelter
from loray.deployments.tool_format import Tool, calls_shelter, json_format, structural_tag
from loray.deployments.tool_parser import ToolCallParser

RESPONSE_FORMAT = "response_format"  # the field, and what errors call its schema among those of tools


@dataclass(frozen=True, slots=True)
class AnswerPlan:
    tools: list[Tool]  # that the model is told of
    grammar: GrammarSpec | None = None
    param: str = ""  # the field that asks for the grammar
    is_forced: bool = False  # calls, and nothing else
    has_format: bool = False  # what is no call follows a format, where a call's marker may be part of a string

    @property
    def shelter(self) -> Shelter | None:
        """Where stop strings don't count."""
        return calls_shelter(is_first=self.has_format) if self.tools else None

    def parser(self) -> ToolCallParser | None:
        """Of one choice; None: all it writes is content."""
        return ToolCallParser(is_first=self.has_format) if self.tools else None


def answer_plan(body: ChatBody) -> AnswerPlan:
    """Raises InvalidRequest."""
    tools = _tools(body)
    spec = body.response_format.spec if body.response_format else None
    if not tools:
        plan = AnswerPlan([], spec, RESPONSE_FORMAT)
        _check_end(body, is_ended=spec is not None)
        return plan
    choice = body.tool_choice or "auto"
    is_named = isinstance(choice, NamedTool)
    is_single = is_named or body.parallel_tool_calls is False
    is_forced = choice != "auto"
    called = [tool for tool in tools if not is_named or tool["function"]["name"] == choice.function.name]  # type: ignore[union-attr]
    tag = structural_tag(called, is_forced, is_single, _answer_format(spec) if spec else None)
    _check_end(body, is_ended=is_forced or is_single or spec is not None)
    return AnswerPlan(tools, GrammarSpec("structural_tag", tag), "tools", is_forced, has_format=spec is not None)


def _tools(body: ChatBody) -> list[Tool]:
    """Those that may be called."""
    names = [tool.function.name for tool in body.tools or []]
    repeated = next((name for name in names if names.count(name) > 1), None)
    if repeated is not None:
        raise ToolError(f"tools: there are two with the name {repeated!r}", "tools")
    choice = body.tool_choice
    if isinstance(choice, NamedTool) and choice.function.name not in names:
        raise ToolError(f"tool_choice: there is no tool {choice.function.name!r}", "tool_choice")
    if choice == "required" and not names:
        raise ToolError("tool_choice: required needs tools", "tool_choice")
    if choice == "none":
        return []
    functions = [tool.function.for_template(f"tools.{index}.function") for index, tool in enumerate(body.tools or [])]
    return [{"type": "function", "function": function} for function in functions]


def _answer_format(spec: GrammarSpec) -> dict[str, Any]:
    """The same for a place within a structural tag."""
    if spec.kind not in ("json_schema", "json_object"):
        raise InvalidRequest(f"{RESPONSE_FORMAT}: {spec.kind} can't be together with tools", RESPONSE_FORMAT)
    schema = json.loads(spec.text) if spec.kind == "json_schema" else {"type": "object"}
    return json_format(schema, RESPONSE_FORMAT)


def _check_end(body: ChatBody, is_ended: bool) -> None:
    """`is_ended`: the grammar comes to an end, after which the model can write nothing more."""
    for name, value in {"ignore_eos": body.ignore_eos, "min_tokens": body.min_tokens}.items():
        if value and is_ended:
            raise InvalidRequest(f"{name}: not with a response_format or a tool_choice that says when the answer ends", name)
