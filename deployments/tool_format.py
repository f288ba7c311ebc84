"""How a model is told of tools and how it writes its calls: the Hermes style, which many chat templates speak. Pure; parses nothing."""

import json
from collections.abc import Iterator
from typing import Any

from loray.deployments.errors import ToolError
from loray.deployments.stop_strings import Shelter

BEGIN = "<tool_call>"
END = "</tool_call>"
XML_CALL = "<function="  # templates that put this within the markers ask for calls that are no JSON
MAX_SPACES = 1  # between two signs of a call's JSON: more would let a model write spaces for ever

Tool = dict[str, Any]  # {"type": "function", "function": {"name", "description"?, "parameters"}}
Message = dict[str, Any]


def is_spoken_by(template: str) -> bool:
    """Whether a chat template describes tools by itself, and in this style."""
    return "tools" in template and BEGIN in template and XML_CALL not in template


def described(messages: list[Message], tools: list[Tool]) -> list[Message]:
    """For templates that don't: messages of the plain roles alone, with the tools, calls and results in their texts."""
    plain = list(_plain(messages))
    if not tools:
        return plain
    is_system = plain[0]["role"] == "system"
    before = [plain[0]["content"]] if is_system else []
    system = {"role": "system", "content": "\n\n".join([*before, _system_text(tools)])}
    return [system, *plain[is_system:]]


def structural_tag(tools: list[Tool], is_forced: bool, is_single: bool, answer: dict[str, Any] | None = None) -> str:
    """xgrammar's, as JSON. Not forced, the model may write an answer instead: any text, or what the `answer` format says."""
    tags = [_tag(tool["function"]) for tool in tools]
    calls = {"type": "tags_with_separator", "tags": tags, "separator": "\n", "at_least_one": True, "stop_after_first": is_single}
    if is_forced:
        wanted = calls
    elif answer:
        wanted = {"type": "or", "elements": [answer, calls]}
    else:
        wanted = {"type": "triggered_tags", "triggers": [BEGIN], "tags": tags, "stop_after_first": is_single}
    return json.dumps({"type": "structural_tag", "format": wanted})


def calls_shelter(is_first: bool) -> Shelter:
    """Calls. Their end counts only at the start of a line, where no JSON has it within a string."""
    return Shelter(BEGIN, f"\n{END}", is_first)


def parsed_arguments(arguments: str, name: str) -> dict[str, Any]:
    """Of a call that a caller sends back; `name` is the field's."""
    try:
        value = json.loads(arguments or "{}")
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()  # refuses half characters and what only Python takes for JSON
    except (ValueError, RecursionError) as error:
        raise ToolError(f"{name}: is not JSON: {error}", name) from None
    if not isinstance(value, dict):
        raise ToolError(f"{name}: must be a JSON object", name)
    return value


def _tag(function: dict[str, Any]) -> dict[str, Any]:
    begin = f'{BEGIN}\n{{"name": {json.dumps(function["name"])}, "arguments": '
    content = {"type": "json_schema", "json_schema": function["parameters"], "max_whitespace_cnt": MAX_SPACES}
    return {"type": "tag", "begin": begin, "content": content, "end": f"}}\n{END}"}


def _system_text(tools: list[Tool]) -> str:
    lines = [
        "You can call functions. Their signatures are within <tools></tools>:",
        "<tools>",
        *(json.dumps(tool, ensure_ascii=False) for tool in tools),
        "</tools>",
        f"To call a function, write a JSON object with its name and its arguments within {BEGIN}{END}:",
        BEGIN,
        '{"name": <function-name>, "arguments": <arguments-object>}',
        END,
    ]
    return "\n".join(lines)


def _plain(messages: list[Message]) -> Iterator[Message]:
    results: list[str] = []  # that follow one another are one message: many templates want user and assistant in turn
    for message in messages:
        if message["role"] == "tool":
            results.append(f"<tool_response>\n{message['content']}\n</tool_response>")
            continue
        if results:
            yield {"role": "user", "content": "\n".join(results)}
            results = []
        calls = [_call_text(call["function"]) for call in message.get("tool_calls", [])]
        content = "\n".join(text for text in (message["content"], *calls) if text)
        yield {"role": message["role"], "content": content} | ({"name": message["name"]} if "name" in message else {})
    if results:
        yield {"role": "user", "content": "\n".join(results)}


def _call_text(function: dict[str, Any]) -> str:
    call = {"name": function["name"], "arguments": function["arguments"]}
    return f"{BEGIN}\n{json.dumps(call, ensure_ascii=False)}\n{END}"
