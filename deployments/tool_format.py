"""How a model is told of tools and how it writes its calls: the Hermes style, which many chat templates speak. Pure; parses nothing."""

import json
from collections.abc import Iterator
from typing import Any

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


def described(messages: list[Message], tools: list[Tool], has_system: bool = True) -> list[Message]:
    """For templates that don't: messages of the plain roles alone, with the tools, calls and results in their texts.

    `has_system`: the template takes a system message; else the first one of a user tells of the tools.
    """
    plain = list(_plain(messages))
    if not tools:
        return plain
    role = "system" if has_system else "user"
    is_there = plain[0]["role"] == role
    texts = [plain[0]["content"]] if is_there else []
    texts.insert(len(texts) if has_system else 0, _tools_text(tools))
    return [{"role": role, "content": "\n\n".join(texts)}, *plain[is_there:]]


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


def json_format(schema: Any, place: str) -> dict[str, Any]:
    """Of a structural tag; `place` says whose schema it is if it is refused."""
    return {"type": "json_schema", "json_schema": schema, "max_whitespace_cnt": MAX_SPACES, "place": place}


def calls_shelter(is_first: bool) -> Shelter:
    """Calls. Their end counts only at the start of a line, where no JSON has it within a string."""
    return Shelter(BEGIN, f"\n{END}", is_first)


def parsed_arguments(arguments: str) -> dict[str, Any] | str:
    """Of a call that a caller sends back: an object, as templates want it; or the text where it is none, as of a call that was cut."""
    try:
        value = json.loads(arguments or "{}")
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()  # refuses half characters and what only Python takes for JSON
    except (ValueError, RecursionError):
        return arguments
    return value if isinstance(value, dict) else arguments


def _tag(function: dict[str, Any]) -> dict[str, Any]:
    begin = f'{BEGIN}\n{{"name": {json.dumps(function["name"])}, "arguments": '
    return {"type": "tag", "begin": begin, "content": json_format(function["parameters"], function["name"]), "end": f"}}\n{END}"}


def _tools_text(tools: list[Tool]) -> str:
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
    results: list[str] = []  # are one message, with what the user says next: many templates want user and assistant in turn
    for message in messages:
        if message["role"] == "tool":
            results.append(f"<tool_response>\n{message['content']}\n</tool_response>")
            continue
        if results and message["role"] == "user":
            message = {**message, "content": "\n".join([*results, message["content"]])}
        elif results:
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
