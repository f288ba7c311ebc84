"""OpenAI's own client, unmodified, against the served application: a random model, so that whatever is right is right by construction."""

import asyncio
import json
from collections.abc import Callable
from typing import Any, Literal

import jsonschema  # type: ignore[import-untyped]
import openai
import pytest
from pydantic import BaseModel, Field

from tests.e2e.conftest import App
from tests.e2e.oracle import Oracle
from tests.weather_tools import CITY, CLOCK, HELLO, WEATHER

pytestmark = pytest.mark.slow

PROMPT = "hello world, this is"
SCHEMAS = {"weather": CITY, "clock": {"type": "object", "maxProperties": 0}}


class Person(BaseModel):
    name: Literal["Ann", "Bö"]
    ages: list[int] = Field(min_length=1, max_length=2)
    is_tall: bool


class GetWeather(BaseModel):
    city: Literal["Bern", "Basel"]


@pytest.fixture(scope="module")
def base(oracle: Oracle) -> str:
    return str(oracle.tokenizer.name_or_path)


@pytest.fixture(scope="module")
def client(app: App) -> openai.OpenAI:
    return openai.OpenAI(base_url=app.url + "/v1", api_key="unused", max_retries=0)


@pytest.fixture(scope="module")
def asynchronous(app: App) -> Callable[[], openai.AsyncOpenAI]:
    """Each event loop needs one of its own."""
    return lambda: openai.AsyncOpenAI(base_url=app.url + "/v1", api_key="unused", max_retries=0)


def chat_ids(oracle: Oracle, messages: list[Any]) -> list[int]:
    return list(oracle.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False))


def greedy_text(oracle: Oracle, adapter_id: str, prompt_ids: list[int], num_new: int) -> str:
    """Without a character that the end cuts."""
    text: str = oracle.tokenizer.decode(oracle.greedy(adapter_id, prompt_ids, num_new), skip_special_tokens=True)
    return text.rstrip("\ufffd")


def check_calls(calls: Any) -> list[str]:
    """Their names, once the arguments are valid."""
    for call in calls:
        jsonschema.validate(json.loads(call.function.arguments), SCHEMAS[call.function.name])
    return [call.function.name for call in calls]


@pytest.mark.parametrize("adapter_id", ["", "a4", "a8"])
def test_a_greedy_chat_says_what_transformers_says(client: openai.OpenAI, oracle: Oracle, base: str, adapter_id: str) -> None:
    wanted: Any = {"messages": HELLO, "max_completion_tokens": 12, "temperature": 0, "extra_body": {"ignore_eos": True}}
    names = [adapter_id, f"{base}:{adapter_id}"] if adapter_id else [base]
    answers = [client.chat.completions.create(model=name, logprobs=True, **wanted).choices[0] for name in names]
    (text,) = {answer.message.content for answer in answers}
    stream = client.chat.completions.create(model=names[0], stream=True, stream_options={"include_usage": True}, **wanted)
    chunks = list(stream)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == text
    assert chunks[-1].usage and chunks[-1].usage.completion_tokens == 12
    assert text == greedy_text(oracle, adapter_id, chat_ids(oracle, HELLO), 12)


def test_completions_take_texts_and_tokens_and_give_several_choices(client: openai.OpenAI, oracle: Oracle, base: str) -> None:
    prompt_ids = oracle.tokenizer(PROMPT)["input_ids"]
    text = greedy_text(oracle, "a8", prompt_ids, 10)
    wanted: Any = {"max_tokens": 10, "temperature": 0, "extra_body": {"ignore_eos": True}}
    for prompt in (PROMPT, [PROMPT], prompt_ids, [prompt_ids, prompt_ids]):
        answer = client.completions.create(model="a8", prompt=prompt, **wanted)
        assert {choice.text for choice in answer.choices} == {text}
    for path in ({"lora_path": "a8"}, {"adapter_id": "a8"}):
        wanted["extra_body"] = {"ignore_eos": True, **path}
        assert client.completions.create(model=base, prompt=PROMPT, **wanted).choices[0].text == text
    answer = client.completions.create(model="a8", prompt=[PROMPT, "other"], n=2, best_of=3, max_tokens=6, seed=3, temperature=1)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3] and len({choice.text for choice in answer.choices}) == 4
    echoed = client.completions.create(model="a8", prompt=PROMPT, echo=True, max_tokens=4, temperature=0)
    assert echoed.choices[0].text.startswith(PROMPT)


def test_asynchronous_chats_run_beside_one_another(asynchronous: Callable[[], openai.AsyncOpenAI], oracle: Oracle, base: str) -> None:
    async def stream(client: openai.AsyncOpenAI, model: str) -> str:
        text = ""
        wanted: Any = {"messages": HELLO, "max_tokens": 12, "temperature": 0, "extra_body": {"ignore_eos": True}}
        async for chunk in await client.chat.completions.create(model=model, stream=True, **wanted):
            text += chunk.choices[0].delta.content or ""
        return text

    async def all_at_once() -> list[str]:
        async with asynchronous() as client:
            return await asyncio.gather(*(stream(client, model) for model in (base, "a4", "a8", base)))

    for adapter_id, text in zip(["", "a4", "a8", ""], asyncio.run(all_at_once()), strict=True):
        assert text == greedy_text(oracle, adapter_id, chat_ids(oracle, HELLO), 12)


def test_choices_have_seeds_of_their_own_and_repeat(client: openai.OpenAI, base: str) -> None:
    def texts(seed: int, n: int) -> list[str | None]:
        answer = client.chat.completions.create(model=base, messages=HELLO, n=n, seed=seed, max_tokens=12, temperature=1.2)
        return [choice.message.content for choice in answer.choices]

    assert texts(7, 3) == texts(7, 3) and len(set(texts(7, 3))) == 3
    assert texts(7, 3)[1:] == texts(8, 2), "each choice has the next seed"


def test_models_are_listed_and_found(client: openai.OpenAI, base: str) -> None:
    models = {model.id: model.model_dump() for model in client.models.list()}
    assert models[base]["parent"] is None and models["a4"]["parent"] == base and models["a4"]["root"] == "a4"
    assert client.models.retrieve("a4").id == "a4" and client.models.retrieve(base).id == base
    with pytest.raises(openai.NotFoundError, match="nobody"):
        client.models.retrieve("nobody")


def test_raw_responses_have_the_headers_of_the_request(client: openai.OpenAI, base: str) -> None:
    raw = client.chat.completions.with_raw_response.create(
        model=base, messages=HELLO, max_tokens=4, extra_headers={"X-Request-Id": "mine-1"}
    )
    assert raw.headers["x-request-id"] == "mine-1" and raw.parse().usage.completion_tokens <= 4
    wanted: Any = {"model": base, "messages": HELLO, "max_tokens": 4, "stream": True}
    with client.chat.completions.with_streaming_response.create(**wanted) as response:
        assert response.headers["content-type"].startswith("text/event-stream") and list(response.iter_lines())[-2] == "data: [DONE]"


def test_embeddings_are_the_same_as_floats_and_as_bytes(client: openai.OpenAI, base: str) -> None:
    as_bytes = client.embeddings.create(model="a4", input=[PROMPT, "other"])  # the client's default is base64
    as_floats = client.embeddings.create(model="a4", input=[PROMPT, "other"], encoding_format="float")
    for one, other in zip(as_bytes.data, as_floats.data, strict=True):
        assert one.embedding == pytest.approx(other.embedding, abs=1e-5)
    assert client.embeddings.create(model=base, input=PROMPT).data[0].embedding != as_floats.data[0].embedding


@pytest.mark.parametrize("model", ["", "a8"])
def test_a_required_call_is_valid_and_streams_as_the_same_call(client: openai.OpenAI, base: str, model: str) -> None:
    wanted: Any = {"model": model or base, "messages": HELLO, "tools": [WEATHER, CLOCK], "tool_choice": "required", "seed": 4}
    wanted |= {"parallel_tool_calls": False, "max_tokens": 300}
    choice = client.chat.completions.create(**wanted).choices[0]
    assert choice.finish_reason == "tool_calls" and choice.message.content is None and len(choice.message.tool_calls or []) == 1
    check_calls(choice.message.tool_calls)
    with client.chat.completions.stream(**wanted) as stream:
        streamed = stream.get_final_completion().choices[0]
    assert streamed.finish_reason == "tool_calls"
    calls = [[(call.function.name, call.function.arguments) for call in one.message.tool_calls or []] for one in (choice, streamed)]
    assert calls[0] == calls[1]


def test_a_named_tool_is_called_and_its_result_is_read(client: openai.OpenAI, base: str) -> None:
    named: Any = {"type": "function", "function": {"name": "weather"}}
    wanted: Any = {"model": base, "tools": [CLOCK, WEATHER], "max_tokens": 300}
    message = client.chat.completions.create(messages=HELLO, tool_choice=named, **wanted).choices[0].message
    assert check_calls(message.tool_calls) == ["weather"] and message.tool_calls
    result: Any = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "sun"}
    said: list[Any] = [*HELLO, message, result]
    wanted |= {"messages": said, "tool_choice": "none", "max_tokens": 8, "temperature": 0, "extra_body": {"ignore_eos": True}}
    answer = client.chat.completions.create(**wanted)
    longer = client.chat.completions.create(**{**wanted, "messages": [*HELLO, message, {**result, "content": "sun and rain"}]})
    assert answer.choices[0].message.content and answer.usage and longer.usage
    assert longer.usage.prompt_tokens > answer.usage.prompt_tokens


def test_several_calls_may_come_together(client: openai.OpenAI, oracle: Oracle, base: str) -> None:
    """After one call the model ends or calls again: without its end token it calls."""
    never_ends = {str(oracle.tokenizer.eos_token_id): -100}
    wanted: Any = {"model": base, "messages": HELLO, "tools": [WEATHER, CLOCK], "tool_choice": "required", "max_tokens": 400}
    choice = client.chat.completions.create(**wanted, logit_bias=never_ends, seed=1).choices[0]
    whole = (choice.message.tool_calls or [])[:-1]  # the last is cut
    assert choice.finish_reason == "length" and len(check_calls(whole)) > 1
    assert len({call.id for call in whole}) == len(whole)


def test_with_auto_the_model_answers_or_calls(client: openai.OpenAI, base: str) -> None:
    wanted: Any = {"model": base, "messages": HELLO, "tools": [WEATHER], "n": 16, "seed": 1, "max_tokens": 300, "temperature": 2}
    answer: Any = {"type": "json_schema", "json_schema": {"name": "yes", "schema": {"enum": ["yes", "no"]}}}
    choices = client.chat.completions.create(**wanted, response_format=answer, parallel_tool_calls=False).choices
    reasons = {choice.finish_reason for choice in choices}
    assert reasons == {"tool_calls", "stop"}
    for choice in choices:
        if choice.finish_reason == "tool_calls":
            assert check_calls(choice.message.tool_calls) == ["weather"]
        else:
            assert json.loads(choice.message.content or "") in ("yes", "no") and not choice.message.tool_calls
    plain = client.chat.completions.create(**{**wanted, "n": 2, "max_tokens": 24}).choices
    assert all(choice.message.content and not choice.message.tool_calls for choice in plain)


def goes_on(client: openai.OpenAI, base: str, said: list[Any]) -> None:
    """With the client's own objects as they came."""
    answer = client.chat.completions.create(model=base, messages=[*HELLO, *said], max_tokens=2)
    assert answer.usage and answer.usage.completion_tokens


@pytest.mark.parametrize("model", ["", "a4"])
def test_the_client_parses_structured_answers(client: openai.OpenAI, base: str, model: str) -> None:
    wanted: Any = {"model": model or base, "messages": HELLO, "response_format": Person, "seed": 2, "max_tokens": 300, "logprobs": True}
    answer = client.chat.completions.parse(**wanted)
    assert isinstance(answer.choices[0].message.parsed, Person) and answer.choices[0].finish_reason == "stop"
    tokens = (answer.choices[0].logprobs and answer.choices[0].logprobs.content) or []
    assert "".join(token.token for token in tokens) == answer.choices[0].message.content
    with client.chat.completions.stream(**wanted) as stream:
        kinds = {event.type for event in stream}
        assert stream.get_final_completion().choices[0].message.parsed == answer.choices[0].message.parsed
    assert {"content.delta", "content.done"} <= kinds
    goes_on(client, base, [answer.choices[0].message, *HELLO])


def test_the_client_parses_a_streamed_call(client: openai.OpenAI, base: str) -> None:
    tools: Any = [openai.pydantic_function_tool(GetWeather)]
    with client.chat.completions.stream(
        model=base, messages=HELLO, tools=tools, tool_choice="required", parallel_tool_calls=False
    ) as stream:
        kinds = {event.type for event in stream}
        message = stream.get_final_completion().choices[0].message
    (call,) = message.tool_calls or []
    assert isinstance(call.function.parsed_arguments, GetWeather)
    goes_on(client, base, [message, {"role": "tool", "tool_call_id": call.id, "content": "sun"}])
    assert {"tool_calls.function.arguments.delta", "tool_calls.function.arguments.done"} <= kinds


def test_errors_are_the_clients_own_and_name_the_parameter(client: openai.OpenAI, base: str) -> None:
    with pytest.raises(openai.NotFoundError, match="nobody"):
        client.chat.completions.create(model="nobody", messages=HELLO)
    bad: dict[str, Any] = {"temperature": 3, "logit_bias": {"99999": 1}, "max_tokens": 10**6, "tool_choice": "required", "top_logprobs": 2}
    bad["response_format"] = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "strin"}}}
    for name, value in bad.items():
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(model=base, messages=HELLO, **{name: value})
        assert caught.value.param == name, caught.value
