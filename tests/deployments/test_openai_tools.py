"""Tools and formats of answers over OpenAI's client, against a model that knows nothing and writes whatever its grammar lets pass."""

import asyncio
import json
import re
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import jsonschema  # type: ignore[import-untyped]
import openai
import pytest
import xgrammar
from pydantic import BaseModel

from loray.deployments.config import ServerArgs
from loray.deployments.http_app import make_app
from loray.deployments.request import GenerationRequest
from loray.deployments.service import Service
from loray.deployments.tokenizer import Tokenizer
from loray.deployments.tool_format import parsed_arguments
from tests.deployments.live_server import live
from tests.deployments.scripted_backend import BASE, EOS_ID, HF, ScriptedBackend, saying, send, tokens_of
from tests.deployments.tiny_grammars import random_text, read, shared_grammars
from tests.weather_tools import CITY, CLOCK, HELLO, WEATHER

pytestmark = pytest.mark.slow  # compiles grammars

CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bern", "days": 3}}\n</tool_call>'


class Person(BaseModel):
    name: Literal["Ann", "Bö"]
    is_tall: bool


class GetWeather(BaseModel):
    city: Literal["Bern", "Basel"]


class FollowsGrammar(ScriptedBackend):
    """Each sequence of a request another text."""

    def script_of(self, request: GenerationRequest) -> Sequence[list[int] | Exception]:
        if not request.sampling.grammar:
            return super().script_of(request)
        texts = (random_text(request.sampling.grammar, seed) for seed in range(20))
        return [*tokens_of(next(text for text in texts if text is not None)), [EOS_ID]]


def service_of(backend: ScriptedBackend) -> Service:
    service = Service(ServerArgs(), Tokenizer(HF), backend, 4096, {"model_device_type": "cpu", "attention": "scripted"})
    service.grammars = shared_grammars()
    return service


def chat(backend: ScriptedBackend, **fields: Any) -> Any:
    return send(service_of(backend), "POST", "/v1/chat/completions", json={"model": BASE, "messages": HELLO, **fields})


def is_let_pass(backend: ScriptedBackend, text: str) -> bool:
    """As a whole answer."""
    matcher = xgrammar.GrammarMatcher(read(backend.requests[-1].sampling.grammar))
    return matcher.accept_string(text) and matcher.accept_token(EOS_ID)


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with live(make_app(service_of(FollowsGrammar([*tokens_of("hello"), [EOS_ID]])))) as address:
        yield f"{address}/v1"


@pytest.fixture(scope="module")
def client(address: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=address, api_key="none", max_retries=0)


def test_a_required_call_is_valid_against_its_tools_schema(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=BASE, messages=HELLO, tools=[WEATHER, CLOCK], tool_choice="required", parallel_tool_calls=False
    )
    (choice,) = answer.choices
    assert choice.finish_reason == "tool_calls" and choice.message.content is None and choice.message.tool_calls
    (call,) = choice.message.tool_calls
    assert call.type == "function" and call.id.startswith("call_")
    schema = {"weather": CITY, "clock": {"type": "object", "maxProperties": 0}}[call.function.name]
    jsonschema.validate(json.loads(call.function.arguments), schema)


def test_a_named_tool_is_called_and_its_result_may_be_sent_back(client: openai.OpenAI) -> None:
    named: Any = {"type": "function", "function": {"name": "weather"}}
    message = client.chat.completions.create(model=BASE, messages=HELLO, tools=[CLOCK, WEATHER], tool_choice=named).choices[0].message
    assert message.tool_calls and message.tool_calls[0].type == "function" and message.tool_calls[0].function.name == "weather"
    result: Any = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "sun"}
    said: list[Any] = [*HELLO, message, result]
    again = client.chat.completions.create(model=BASE, messages=said, tools=[CLOCK, WEATHER], tool_choice="none")
    assert (again.choices[0].message.content, again.choices[0].finish_reason) == ("hello", "stop")


def test_the_clients_helper_streams_a_call(client: openai.OpenAI) -> None:
    tools = [openai.pydantic_function_tool(GetWeather)]
    with client.chat.completions.stream(model=BASE, messages=HELLO, tools=tools, tool_choice="required") as stream:
        kinds = {event.type for event in stream}
        (choice,) = stream.get_final_completion().choices
    assert {"tool_calls.function.arguments.delta", "tool_calls.function.arguments.done"} <= kinds and "content.delta" not in kinds
    assert choice.finish_reason == "tool_calls" and choice.message.tool_calls
    assert isinstance(choice.message.tool_calls[0].function.parsed_arguments, GetWeather)


def test_the_client_parses_a_structured_answer(client: openai.OpenAI) -> None:
    answer = client.chat.completions.parse(model=BASE, messages=HELLO, response_format=Person)
    assert isinstance(answer.choices[0].message.parsed, Person) and answer.choices[0].finish_reason == "stop"
    with client.chat.completions.stream(model=BASE, messages=HELLO, response_format=Person) as stream:
        assert isinstance(stream.get_final_completion().choices[0].message.parsed, Person)


def test_an_answer_with_tools_and_a_format_is_a_call_or_in_the_format(client: openai.OpenAI) -> None:
    tools = [openai.pydantic_function_tool(GetWeather)]
    answer = client.chat.completions.parse(model=BASE, messages=HELLO, response_format=Person, tools=tools, n=2)
    for choice in answer.choices:
        calls = choice.message.tool_calls
        assert isinstance(calls[0].function.parsed_arguments, GetWeather) if calls else isinstance(choice.message.parsed, Person)


def test_the_asynchronous_client_and_raw_responses_work(address: str) -> None:
    async def one() -> None:
        async with openai.AsyncOpenAI(base_url=address, api_key="none", max_retries=0) as client:
            raw = await client.chat.completions.with_raw_response.create(
                model=BASE, messages=HELLO, tools=[WEATHER], tool_choice="required"
            )
            assert raw.headers["content-type"] == "application/json"
            assert raw.parse().choices[0].finish_reason == "tool_calls"
            async with client.chat.completions.stream(model=BASE, messages=HELLO, response_format=Person) as stream:
                assert isinstance((await stream.get_final_completion()).choices[0].message.parsed, Person)
            parts = [part async for part in await client.completions.create(model=BASE, prompt="x", stream=True)]
            assert "".join(part.choices[0].text for part in parts) == "hello"

    asyncio.run(asyncio.wait_for(one(), 60))


@pytest.mark.parametrize("stream", [False, True])
def test_text_before_calls_is_content_and_each_call_has_its_index(stream: bool) -> None:
    response = chat(saying(f"I look.\n{CALL}\n{CALL}"), tools=[WEATHER], stream=stream)
    if not stream:
        message = response.json()["choices"][0]["message"]
        assert message["content"] == "I look." and [call["function"]["name"] for call in message["tool_calls"]] == ["weather"] * 2
        return
    chunks = [json.loads(line.removeprefix("data: ")) for line in response.text.split("\n\n")[:-2]]
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert "".join(delta.get("content") or "" for delta in deltas) == "I look."
    calls = [call for delta in deltas for call in delta.get("tool_calls", [])]
    assert [(call["index"], call["function"]) for call in calls if "id" in call] == [
        (index, {"name": "weather", "arguments": ""}) for index in (0, 1)
    ]
    assert all(call.keys() == {"index", "function"} for call in calls if "id" not in call)
    for index in (0, 1):
        pieces = [call["function"]["arguments"] for call in calls if call["index"] == index]
        assert len(pieces) > 2 and json.loads("".join(pieces)) == {"city": "Bern", "days": 3}
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"


def test_a_call_cut_by_length_ends_by_length() -> None:
    backend = ScriptedBackend(tokens_of(CALL[:58]), finish="length")
    (choice,) = chat(backend, tools=[WEATHER]).json()["choices"]
    assert (choice["finish_reason"], choice["message"]["tool_calls"][0]["function"]["arguments"]) == ("length", '{"city": "Ber')


@pytest.mark.parametrize("choice", ["auto", "required"])
@pytest.mark.parametrize("stop", ['"days"', "}", "\n", "3", "tool_call>\n"])
def test_a_stop_string_does_not_cut_a_call(stop: str, choice: str) -> None:
    (answer,) = chat(saying(CALL), tools=[WEATHER], tool_choice=choice, stop=stop).json()["choices"]
    (call,) = answer["message"]["tool_calls"]
    assert (json.loads(call["function"]["arguments"]), answer["finish_reason"]) == ({"city": "Bern", "days": 3}, "tool_calls")


def test_a_stop_string_counts_before_and_after_calls() -> None:
    before, after = (chat(saying(text), tools=[WEATHER], stop="#").json()["choices"][0] for text in (f"a # {CALL}", f"{CALL} b # c"))
    assert (before["message"]["content"], before["finish_reason"]) == ("a ", "stop") and "tool_calls" not in before["message"]
    assert (after["message"]["content"], after["finish_reason"], len(after["message"]["tool_calls"])) == (" b", "tool_calls", 1)


def test_a_stop_string_can_not_keep_a_required_call_away() -> None:
    (answer,) = chat(saying(CALL), tools=[WEATHER], tool_choice="required", stop="<").json()["choices"]
    assert answer["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("stop", [None, "Bern"])
def test_an_answer_in_a_format_may_speak_of_calls(stop: str | None) -> None:
    text = json.dumps({"answer": CALL})
    backend = saying(text)
    (choice,) = chat(backend, tools=[WEATHER], response_format={"type": "json_object"}, stop=stop).json()["choices"]
    assert is_let_pass(backend, text) and "tool_calls" not in choice["message"]
    assert (choice["message"]["content"], choice["finish_reason"]) == (text.partition("Bern")[0] if stop else text, "stop")


def test_stop_tokens_beside_tools_are_special_ones() -> None:
    backend = saying(CALL)
    assert chat(backend, tools=[WEATHER], stop_token_ids=[EOS_ID]).status_code == 200
    assert backend.requests[0].stop_token_ids == [EOS_ID]
    assert chat(backend, tools=[WEATHER], tool_choice="none", stop_token_ids=[5]).status_code == 200


@pytest.mark.parametrize(
    ("fields", "passing", "refused"),
    [
        ({}, ["hello", CALL, f"so: {CALL}", f"{CALL}\n{CALL}"], [CALL.replace("Bern", "Rome"), CALL[:30], f"{CALL[:20]}hello"]),
        ({"parallel_tool_calls": False}, ["hello", CALL, f"so: {CALL}"], [f"{CALL}\n{CALL}"]),
        ({"tool_choice": "required"}, [CALL, f"{CALL}\n{CALL}"], ["hello", f"so: {CALL}", CALL.replace("weather", "other")]),
        ({"tool_choice": {"type": "function", "function": {"name": "weather"}}}, [CALL], [f"{CALL}\n{CALL}", "hello"]),
        ({"response_format": {"type": "json_object"}}, ['{"a": 1}', CALL], ["hello", f"so: {CALL}"]),
        ({"response_format": {"type": "json_object"}, "tool_choice": "required"}, [CALL], ['{"a": 1}']),
    ],
)
def test_the_choice_of_tools_binds_the_text(fields: dict[str, Any], passing: list[str], refused: list[str]) -> None:
    backend = saying("x")
    assert chat(backend, tools=[WEATHER, CLOCK], **fields).status_code == 200
    assert [text for text in passing if not is_let_pass(backend, text)] == []
    assert [text for text in refused if is_let_pass(backend, text)] == []


def test_tools_that_may_not_be_called_are_not_told_of() -> None:
    backend = saying(CALL)
    answer = chat(backend, tools=[WEATHER], tool_choice="none").json()
    assert answer["choices"][0]["message"] == {"role": "assistant", "content": CALL, "refusal": None}
    assert backend.requests[0].sampling.grammar == b"" and "weather" not in HF.decode(backend.requests[0].prompt_ids)
    chat(backend, tools=[WEATHER])
    assert json.dumps(CITY, ensure_ascii=False) in HF.decode(backend.requests[1].prompt_ids)


@pytest.mark.parametrize(
    ("wanted", "pattern"),
    [
        ({"type": "json_object"}, r"\{.*\}"),
        ({"type": "json_schema", "json_schema": {"name": "any"}}, r"\{.*\}"),
        ({"type": "json_schema", "json_schema": {"name": "it", "schema": {"enum": ["a", "b"]}, "strict": False}}, '"[ab]"'),
        ({"type": "regex", "regex": "[0-9]{3}"}, "[0-9]{3}"),
        ({"type": "ebnf", "grammar": 'root ::= "yes" | "no"'}, "yes|no"),
    ],
)
def test_the_format_binds_the_text(wanted: dict[str, Any], pattern: str) -> None:
    response = chat(FollowsGrammar([]), response_format=wanted)
    assert re.fullmatch(pattern, response.json()["choices"][0]["message"]["content"], re.DOTALL), response.text


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "gone"}}}, "tool_choice"),
        ({"tools": [WEATHER, WEATHER]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}]}, "tools.0.function.parameters"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"not": {}}}}]}, "tools"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "prime"}}}}, "response_format"),
        ({"response_format": {"type": "regex", "regex": "("}}, "response_format"),
        ({"response_format": {"type": "regex", "regex": "a"}, "tools": [WEATHER]}, "response_format"),
        ({"response_format": {"type": "json_object"}, "ignore_eos": True}, "ignore_eos"),
        ({"tools": [WEATHER], "tool_choice": "required", "min_tokens": 5}, "min_tokens"),
        ({"tools": [WEATHER], "stop_token_ids": [EOS_ID, 5]}, "stop_token_ids"),
    ],
)
def test_tools_and_formats_that_can_not_be_are_refused_by_name(fields: dict[str, Any], param: str) -> None:
    backend = saying("x")
    response = chat(backend, **fields)
    assert (response.status_code, response.json()["error"]["param"], backend.requests) == (400, param, []), response.text


def test_a_bad_schema_among_tools_is_refused_with_the_name_of_its_own() -> None:
    bad = {"type": "function", "function": {"name": "guess", "parameters": {"properties": {"a": {"not": {}}}}}}
    error = chat(saying("x"), tools=[WEATHER, bad]).json()["error"]
    assert (error["code"], error["param"]) == ("tool_error", "tools") and error["message"].startswith("tools: guess: properties/a: not ")
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"uniqueItems": True}}}
    assert "response_format: uniqueItems" in chat(saying("x"), tools=[WEATHER], response_format=wanted).json()["error"]["message"]


@pytest.mark.parametrize("value", ['{"a": "\\ud800"}', '{"a": NaN}', '{"minimum": 1e999}'])
def test_a_schema_that_json_can_not_write_is_refused(value: str) -> None:
    tool = f'{{"type": "function", "function": {{"name": "f", "parameters": {value}}}}}'
    body = f'{{"model": "{BASE}", "messages": [{{"role": "user", "content": "x"}}], "tools": [{tool}]}}'
    response = send(
        service_of(saying("x")), "POST", "/v1/chat/completions", content=body.encode(), headers={"content-type": "application/json"}
    )
    assert (response.status_code, response.json()["error"]["param"]) == (400, "tools.0.function.parameters")


def test_what_openais_client_adds_to_an_answer_may_be_sent_back_with_it() -> None:
    function = {"name": "weather", "arguments": '{"city": "Bern"}', "parsed_arguments": {"city": "Bern"}}
    called = {"role": "assistant", "content": None, "parsed": None, "tool_calls": [{"id": "1", "index": 0, "function": function}]}
    result = {"role": "tool", "tool_call_id": "1", "content": "sun"}
    parsed = {"role": "assistant", "content": '{"name": "Ann"}', "parsed": {"name": "Ann"}}
    assert chat(saying("x"), messages=[*HELLO, called, result, parsed, *HELLO]).status_code == 200


def test_a_message_with_a_broken_call_is_blamed_for_nothing_else() -> None:
    broken = {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "function": {"name": "weather", "arguments": "{}", "x": 1}}]}
    message = chat(saying("x"), messages=[*HELLO, broken]).json()["error"]["message"]
    assert "tool_calls.0.function.x" in message and "content" not in message


def test_a_format_that_can_not_be_enforced_beside_tools_is_blamed_itself() -> None:
    schema = {"type": "object", "not": {}}
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    error = chat(saying("x"), tools=[WEATHER], response_format=wanted).json()["error"]
    assert error["param"] == "response_format" and error["message"].startswith("response_format: ") and error["code"] != "tool_error"


def test_a_chunk_of_a_call_with_logprobs_has_no_empty_content() -> None:
    stream = chat(saying(CALL), tools=[WEATHER], stream=True, logprobs=True).text
    deltas = [json.loads(line[6:])["choices"][0]["delta"] for line in stream.splitlines() if line.startswith("data: {")]
    assert all(delta["content"] is None for delta in deltas if "content" in delta) and any("tool_calls" in delta for delta in deltas)


@pytest.mark.parametrize("arguments", ['{"city": "Zür', "[1]", "NaN", '{"a": NaN}', '{"a": "\\ud800"}', '{"\\ud800": 1}'])
def test_arguments_of_a_call_sent_back_that_are_no_json_object_stay_a_text(arguments: str) -> None:
    """A call that max_tokens cut is such a one."""
    assert parsed_arguments(arguments) == arguments
    call = {"id": "1", "function": {"name": "weather", "arguments": arguments}}
    result = {"role": "tool", "tool_call_id": "1", "content": "what?"}
    assert chat(saying("x"), messages=[*HELLO, {"role": "assistant", "content": None, "tool_calls": [call]}, result]).status_code == 200


def test_a_tool_may_be_called_as_a_field_is() -> None:
    tool = {"type": "function", "function": {"name": "response_format", "parameters": {"type": "object", "not": {}}}}
    error = chat(saying("x"), tools=[tool]).json()["error"]
    assert (error["param"], error["code"]) == ("tools", "tool_error")
