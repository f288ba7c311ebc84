import json
from typing import Any

import pytest

from loray.deployments.tool_format import described, is_spoken_by, structural_tag
from loray.deployments.tool_parser import ToolCallParser

ARGUMENTS = '{"city": "Bern}</tool_call>\\"", "days": [1, {"a": 2}]}'
CALL = f'<tool_call>\n{{"name": "weather", "arguments": {ARGUMENTS}}}\n</tool_call>'
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}


def parsed(pieces: list[str], is_cut: bool = False, is_first: bool = False) -> tuple[list[str], list[dict[str, str]]]:
    """The pieces of text that came, and the calls."""
    parser, texts, calls = ToolCallParser(is_first), [], []
    for piece in pieces:
        said = parser.push(piece)
        texts.append(said.text)
        for call in said.calls:
            if call.name:
                assert call.index == len(calls) and not call.arguments
                calls.append({"name": call.name, "arguments": ""})
            calls[call.index]["arguments"] += call.arguments
    return [*texts, parser.flush(is_cut)], calls


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
@pytest.mark.parametrize(
    ("text", "content", "num_calls"),
    [
        ("hello <b> world", "hello <b> world", 0),
        ("  spaces stay \n", "  spaces stay \n", 0),
        ("a < b <tool", "a < b <tool", 0),
        (CALL, "", 1),
        (f"I look.\n{CALL}", "I look.", 1),
        (f"{CALL}\n{CALL}\n", "", 2),
        (f"{CALL} and {CALL}\nbye", " and\nbye", 2),
        ("", "", 0),
    ],
)
def test_calls_are_found_however_the_text_is_cut(text: str, content: str, num_calls: int, size: int) -> None:
    texts, calls = parsed([text[start : start + size] for start in range(0, len(text), size)])
    assert "".join(texts) == content
    assert calls == [{"name": "weather", "arguments": ARGUMENTS}] * num_calls


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize(
    ("text", "content", "num_calls"),
    [(f'{{"a": "{CALL}"}} ', f'{{"a": "{CALL}"}} ', 0), (f" \n{CALL}\n{CALL}", "", 2), ("<tool> x", "<tool> x", 0), (" {", " {", 0)],
)
def test_calls_that_may_only_come_first_are_found_nowhere_else(text: str, content: str, num_calls: int, size: int) -> None:
    texts, calls = parsed([text[start : start + size] for start in range(0, len(text), size)], is_first=True)
    assert ("".join(texts), len(calls)) == (content, num_calls)


def test_text_is_given_out_as_soon_as_it_can_begin_no_marker() -> None:
    assert parsed(["hello", " <", "b>", " <tool_", "x"])[0] == ["hello", "", " <b>", "", " <tool_x", ""]


def test_arguments_are_given_out_as_they_come() -> None:
    parser = ToolCallParser()
    parser.push('<tool_call>\n{"name": "f", "arguments": ')
    assert [call.arguments for call in parser.push('{"a": ').calls] == ['{"a": ']
    assert [call.arguments for call in parser.push("1}}\n</tool").calls] == ["1}"]


@pytest.mark.parametrize("end", range(1, len(CALL)))
def test_a_call_that_was_cut_off_leaves_nothing_in_the_text(end: int) -> None:
    texts, calls = parsed(["so: ", CALL[:end]], is_cut=True)
    assert "".join(texts).strip() == "so:"
    assert all(ARGUMENTS.startswith(call["arguments"]) for call in calls)


def test_a_template_that_knows_no_tools_gets_them_within_the_messages() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Zürich"}}}
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "be kind"},
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "", "tool_calls": [call, call]},
        {"role": "tool", "content": "sun", "tool_call_id": "1"},
        {"role": "tool", "content": "rain", "tool_call_id": "1"},
        {"role": "user", "content": "thanks"},
    ]
    system, *others = described(messages, [WEATHER])
    assert system["role"] == "system" and system["content"].startswith("be kind\n\n") and json.dumps(WEATHER) in system["content"]
    written = '<tool_call>\n{"name": "weather", "arguments": {"city": "Zürich"}}\n</tool_call>'
    results = "<tool_response>\nsun\n</tool_response>\n<tool_response>\nrain\n</tool_response>"
    assert others == [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": f"{written}\n{written}"},
        {"role": "user", "content": f"{results}\nthanks"},
    ]
    assert described([*messages[:5], messages[2]], [WEATHER])[3:] == [{"role": "user", "content": results}, others[1]]


def test_tools_have_a_system_message_of_their_own_where_there_is_none() -> None:
    hello = {"role": "user", "content": "hello"}
    assert [message["role"] for message in described([hello], [WEATHER])] == ["system", "user"]
    assert described([hello], []) == [hello]


def test_the_first_message_of_a_user_tells_of_tools_where_a_template_takes_no_system_message() -> None:
    messages = [{"role": role, "content": text} for role, text in (("user", "hello"), ("assistant", "yes?"), ("user", "the weather"))]
    first, *others = described(messages, [WEATHER], has_system=False)
    assert others == messages[1:] and first["role"] == "user" and first["content"].endswith("</tool_call>\n\nhello")
    assert json.dumps(WEATHER) in first["content"]
    assert [message["role"] for message in described(messages[1:], [WEATHER], has_system=False)] == ["user", "assistant", "user"]


@pytest.mark.parametrize(
    ("template", "is_spoken"),
    [
        ("{% if tools %}<tools>{{ tools }}</tools> answer with <tool_call>{% endif %}", True),
        ("{{ messages }}", False),
        ("{% if tools %}{{ tools }}[TOOL_CALLS]{% endif %}", False),
        ("{% if tools %}<tool_call><function=name>{% endif %}", False),
    ],
)
def test_a_template_speaks_the_style_when_it_writes_tools_and_its_marker(template: str, is_spoken: bool) -> None:
    assert is_spoken_by(template) == is_spoken


def test_a_structural_tag_has_one_tag_for_each_tool() -> None:
    tag = json.loads(structural_tag([WEATHER, WEATHER], is_forced=True, is_single=True))["format"]
    assert (len(tag["tags"]), tag["at_least_one"], tag["stop_after_first"]) == (2, True, True)
