import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from loray.deployments.errors import AdapterFailed, AdapterNotFound, Incomplete, LorayError, Overloaded, Unhealthy
from loray.deployments.http_app import make_app
from loray.models.step import Sampling
from tests.deployments.live_server import live
from tests.deployments.scripted_backend import BASE, HF, MAX_TOTAL_TOKENS, ScriptedBackend, post, saying, send, service_of, tokens_of

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
HELLO: list[Any] = [{"role": "user", "content": "hello"}]


def chat(backend: ScriptedBackend, **fields: Any) -> dict[str, Any]:
    response = post(backend, CHAT, {"model": BASE, "messages": HELLO, **fields})
    assert response.status_code == 200, response.text
    return response.json()


def complete(backend: ScriptedBackend, **fields: Any) -> dict[str, Any]:
    response = post(backend, COMPLETIONS, {"model": BASE, "prompt": "hello", **fields})
    assert response.status_code == 200, response.text
    return response.json()


def refusal(path: str, **fields: Any) -> dict[str, Any]:
    backend = saying("x")
    basic = {"messages": HELLO} if path == CHAT else {"prompt": "hello"}
    response = post(backend, path, {"model": BASE, **basic, **fields})
    assert (response.status_code, backend.requests) == (400, [])
    error = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"} and error["type"] == "invalid_request_error"
    return error


def chunks(text: str) -> list[dict[str, Any]]:
    *events, done, end = text.split("\n\n")
    assert (done, end) == ("data: [DONE]", "")
    return [json.loads(event.removeprefix("data: ")) for event in events]


@pytest.fixture(scope="module")
def client() -> Iterator[openai.OpenAI]:
    with live(make_app(service_of(saying("hello world 日本語")))) as address:
        yield openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)


def test_the_openai_client_chats(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model=BASE, messages=HELLO, temperature=0, seed=1, logprobs=True)
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", "hello world 日本語", "stop")
    assert choice.logprobs and choice.logprobs.content and "".join(token.token for token in choice.logprobs.content) == "hello world 日本語"
    assert answer.usage and answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.id.startswith("chatcmpl-") and answer.object == "chat.completion"


def test_the_openai_client_streams_a_chat(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(model=BASE, messages=HELLO, stream=True, stream_options={"include_usage": True})
    *parts, last = list(stream)
    assert "".join(part.choices[0].delta.content or "" for part in parts) == "hello world 日本語"
    assert parts[0].choices[0].delta.role == "assistant"
    assert [part.choices[0].finish_reason for part in parts] == [None] * (len(parts) - 1) + ["stop"]
    assert last.choices == [] and last.usage and last.usage.completion_tokens == len(HF.encode("hello world 日本語")) + 1
    assert len({part.id for part in [*parts, last]}) == 1


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_only_a_stream_without_stop_strings_may_rest_between_tokens(path: str) -> None:
    backend = saying("x")
    asked = {"messages": [{"role": "user", "content": "hello"}]} if "chat" in path else {"prompt": "hello"}
    for fields in ({"stream": True}, {"stream": True, "stop": "y"}, {}):
        assert post(backend, path, {"model": BASE, **asked, **fields}).status_code == 200
    assert [request.may_rest for request in backend.requests] == [True, False, False]


def test_the_openai_client_completes(client: openai.OpenAI) -> None:
    answer = client.completions.create(model=BASE, prompt="hello")
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("hello world 日本語", "stop")
    assert answer.object == "text_completion"


def test_the_openai_client_streams_completions_of_several_prompts(client: openai.OpenAI) -> None:
    texts = ["", ""]
    for part in client.completions.create(model=BASE, prompt=["a", "b"], stream=True):
        texts[part.choices[0].index] += part.choices[0].text
    assert texts == ["hello world 日本語"] * 2


def test_the_openai_client_sees_the_error_kinds(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.chat.completions.create(model=BASE, messages=HELLO, temperature=3)
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("missing")
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")


def test_the_openai_client_raises_on_an_error_within_a_stream() -> None:
    with live(make_app(service_of(ScriptedBackend([*tokens_of("hello"), Incomplete("lost")])))) as address:
        client = openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)
        with pytest.raises(openai.APIError, match="lost"):
            list(client.chat.completions.create(model=BASE, messages=HELLO, stream=True))


def test_the_models_are_the_base_and_its_adapters(client: openai.OpenAI) -> None:
    models = {model.id: model for model in client.models.list()}
    assert list(models) == [BASE, "pirate", "org/poet"]
    assert (models[BASE].root, models[BASE].parent) == (BASE, None)  # type: ignore[attr-defined]
    assert (models["org/poet"].root, models["org/poet"].parent) == ("org/poet", BASE)  # type: ignore[attr-defined]
    assert client.models.retrieve("org/poet").id == "org/poet"
    assert client.models.retrieve(f"{BASE}:pirate").id == f"{BASE}:pirate"


def test_adapters_whose_names_mean_the_base_are_no_models(monkeypatch: pytest.MonkeyPatch) -> None:
    async def adapters(self: ScriptedBackend) -> list[str]:
        return [BASE, f"{BASE}:pirate", f"{BASE}s", "pirate"]

    monkeypatch.setattr(ScriptedBackend, "adapters", adapters)
    models = send(service_of(saying("x")), "GET", "/v1/models").json()["data"]
    assert [model["id"] for model in models] == [BASE, f"{BASE}s", "pirate"]


@pytest.mark.parametrize(
    ("model", "adapter_id"), [(BASE, ""), ("pirate", "pirate"), ("org/poet", "org/poet"), (f"{BASE}:pirate", "pirate")]
)
def test_the_model_names_the_base_or_an_adapter(model: str, adapter_id: str) -> None:
    backend = saying("x")
    assert chat(backend, model=model)["model"] == model
    complete(backend, model=model)
    assert [request.adapter_id for request in backend.requests] == [adapter_id] * 2


@pytest.mark.parametrize("fields", [{"lora_path": "pirate"}, {"adapter_id": "pirate"}, {"adapter_id": "pirate", "model": "pirate"}])
def test_completions_take_the_adapter_by_other_names_too(fields: dict[str, Any]) -> None:
    backend = saying("x")
    complete(backend, **fields)
    assert backend.requests[0].adapter_id == "pirate"


def test_two_different_adapters_are_refused() -> None:
    assert "different adapters" in refusal(COMPLETIONS, adapter_id="pirate", lora_path="poet")["message"]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"temperature": 0, "seed": 5}, Sampling()),
        ({"seed": 5}, Sampling(temperature=1.0, seed=5)),
        ({"seed": -1}, Sampling(temperature=1.0, seed=2**63 - 1)),
        ({"temperature": 0.5, "top_p": 0.9, "top_k": 3, "seed": 5}, Sampling(temperature=0.5, top_p=0.9, top_k=3, seed=5)),
    ],
)
def test_sampling_is_on_unless_the_temperature_is_zero(fields: dict[str, Any], expected: Sampling) -> None:
    backend = saying("x")
    chat(backend, **fields)
    assert backend.requests[0].sampling == expected


def test_the_chat_template_writes_the_prompt() -> None:
    backend = saying("x")
    parts = [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]
    echoed = {"role": "assistant", "content": "hi", "refusal": None, "tool_calls": None, "annotations": []}
    chat(backend, messages=[{"role": "system", "content": "be kind"}, {"role": "user", "content": parts}, echoed, *HELLO])
    text = "<|im_start|>system\nbe kind<|im_end|>\n<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\nhi<|im_end|>\n"
    text += "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    assert backend.requests[0].prompt_ids == HF.encode(text, add_special_tokens=False)


def test_what_the_template_refuses_is_the_callers_mistake() -> None:
    error = refusal(CHAT, messages=[{"role": "assistant", "content": "hi"}])
    assert "must not be from the assistant" in error["message"] and error["param"] == "messages"


def test_prompts_may_be_token_ids() -> None:
    backend = saying("x")
    complete(backend, prompt=[5, 6, 7])
    complete(backend, prompt=[[5, 6], [7]])
    assert sorted(request.prompt_ids for request in backend.requests) == [[5, 6], [5, 6, 7], [7]]
    assert "prompt" in refusal(COMPLETIONS, prompt=[5, 100_000])["message"]


def test_several_prompts_answer_in_order_with_one_usage() -> None:
    answer = complete(saying("x"), prompt=["hello", "world"])
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    num_prompt = len(HF.encode("hello")) + len(HF.encode("world"))
    assert answer["usage"] == {"prompt_tokens": num_prompt, "completion_tokens": 4, "total_tokens": num_prompt + 4}


def test_one_failed_prompt_fails_the_request_and_ends_the_others() -> None:
    class OneFails(ScriptedBackend):
        def generate(self, request):  # type: ignore[no-untyped-def]
            if request.prompt_ids == [5]:
                return ScriptedBackend([Incomplete("lost")]).generate(request)
            return super().generate(request)

    backend = OneFails([*tokens_of("hello"), [2]], turn_s=1.0)
    response = post(backend, COMPLETIONS, {"model": BASE, "prompt": [[5], [6], [7]]})
    assert (response.status_code, response.json()["error"]["message"]) == (500, "lost")
    assert backend.endings == ["CancelledError"] * 2


def test_completions_default_to_sixteen_tokens_and_chat_to_what_fits() -> None:
    backend = saying("x")
    complete(backend)
    chat(backend)
    chat(backend, max_tokens=5)
    chat(backend, max_tokens=5, max_completion_tokens=6)
    fits = MAX_TOTAL_TOKENS - len(backend.requests[1].prompt_ids)
    assert [request.max_new_tokens for request in backend.requests] == [16, fits, 5, 6]


def test_a_completion_without_max_tokens_takes_what_is_left() -> None:
    backend = saying("x")
    complete(backend, prompt=[5] * (MAX_TOTAL_TOKENS - 3))
    assert [request.max_new_tokens for request in backend.requests] == [3]


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
def test_too_many_tokens_of_a_chat_are_blamed_on_the_field_that_asks_for_them(field: str) -> None:
    assert refusal(CHAT, **{field: 1000})["param"] == field


def test_too_many_tokens_are_refused_with_both_numbers() -> None:
    error = refusal(COMPLETIONS, max_tokens=1000)
    assert error["param"] == "max_tokens" and "1000" in error["message"] and str(MAX_TOTAL_TOKENS) in error["message"]


@pytest.mark.parametrize("stop", ["o w", ["zzz", "o w"], ["a long stop string that never comes", "o w"]])
@pytest.mark.parametrize("stream", [False, True])
def test_the_stop_string_is_removed(stop: str | list[str], stream: bool) -> None:
    backend = ScriptedBackend(tokens_of("hello world, this is a test"), finish="length")
    response = post(backend, COMPLETIONS, {"model": BASE, "prompt": "x", "stop": stop, "stream": stream})
    choices = [chunk["choices"][0] for chunk in chunks(response.text)] if stream else response.json()["choices"]
    assert "".join(choice["text"] for choice in choices) == "hell"
    assert choices[-1]["finish_reason"] == "stop" and backend.endings == ["GeneratorExit"]


def test_a_stop_string_may_be_longer_than_a_list_of_them() -> None:
    response = post(saying("hello world"), COMPLETIONS, {"model": BASE, "prompt": "x", "stop": "Observation:"})
    assert response.status_code == 200 and response.json()["choices"][0]["text"] == "hello world"


@pytest.mark.parametrize("model", ["", f"{BASE}:"])
def test_a_model_without_a_name_does_not_exist(model: str) -> None:
    response = post(saying("x"), COMPLETIONS, {"model": model, "prompt": "x"})
    assert response.status_code == 404 and response.json()["error"]["code"] == "model_not_found"


def test_the_end_by_length_is_told() -> None:
    assert complete(ScriptedBackend(tokens_of("hello"), finish="length"))["choices"][0]["finish_reason"] == "length"


def test_usage_is_null_in_chunks_only_when_asked_for() -> None:
    plain = chunks(post(saying("x"), CHAT, {"model": BASE, "messages": HELLO, "stream": True}).text)
    assert not any("usage" in chunk for chunk in plain)
    options = {"stream": True, "stream_options": {"include_usage": True}}
    *firsts, last = chunks(post(saying("x"), CHAT, {"model": BASE, "messages": HELLO, **options}).text)
    assert all(chunk["usage"] is None for chunk in firsts) and last["usage"]["completion_tokens"] == 2


@pytest.mark.parametrize(
    ("path", "name", "value"),
    [
        (CHAT, "store", True),
        (COMPLETIONS, "suffix", "end"),
        (COMPLETIONS, "adapter_source", "ftp"),
    ],
)
def test_what_would_be_ignored_is_refused_by_name(path: str, name: str, value: Any) -> None:
    error = refusal(path, **{name: value})
    assert (error["param"], "not supported" in error["message"]) == (name, True)


def test_values_that_ask_for_nothing_are_accepted() -> None:
    both = {"n": 1, "presence_penalty": 0, "frequency_penalty": 0.0, "logit_bias": {}, "user": "u", "stop": None, "stream_options": None}
    hints = {"metadata": {"a": "b"}, "store": False, "service_tier": "auto", "prompt_cache_key": "k", "modalities": ["text"]}
    chat(saying("x"), **both, **hints, tools=[], tool_choice="none", response_format={"type": "text"}, top_logprobs=0)
    complete(saying("x"), **both, echo=False, best_of=1, logprobs=None, suffix=None)


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (CHAT, {"temprature": 1}, "temprature"),
        (CHAT, {"temperature": "1"}, "temperature"),
        (CHAT, {"temperature": 2.5}, "temperature"),
        (CHAT, {"messages": []}, "messages"),
        (CHAT, {"messages": "hello"}, "messages"),
        (CHAT, {"messages": [{"role": "function", "content": "x"}]}, "messages.0.role"),
        (CHAT, {"messages": [{"role": "tool", "content": "x"}]}, "messages.0.tool_call_id"),
        (CHAT, {"messages": [{"role": "user", "content": "x", "tool_call_id": "1"}]}, "messages.0.tool_call_id"),
        (CHAT, {"messages": [{"role": "assistant", "content": None}]}, "messages.0.content"),
        (CHAT, {"top_logprobs": 2}, "top_logprobs"),
        (CHAT, {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        (CHAT, {"logit_bias": {"five": 1}}, "logit_bias"),
        (CHAT, {"logit_bias": {"5": 101}}, "logit_bias"),
        (CHAT, {"n": 17}, "n"),
        (CHAT, {"min_tokens": 6, "max_tokens": 5}, "min_tokens"),
        (CHAT, {"stop_token_ids": [-1]}, "stop_token_ids"),
        (CHAT, {"service_tier": "priority"}, "service_tier"),
        (CHAT, {"reasoning_effort": "high"}, "reasoning_effort"),
        (CHAT, {"response_format": {"type": "xml"}}, "response_format.type"),
        (CHAT, {"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        (CHAT, {"response_format": {"type": "json_object", "regex": "a"}}, "response_format.regex"),
        (CHAT, {"tools": [{"type": "custom", "custom": {"name": "f"}}]}, "tools.0"),
        (CHAT, {"tools": [{"type": "function", "function": {"name": "no spaces"}}]}, "tools.0.function.name"),
        (CHAT, {"tool_choice": "sometimes"}, "tool_choice"),
        (COMPLETIONS, {"n": 3, "best_of": 2}, "best_of"),
        (COMPLETIONS, {"best_of": 2, "stream": True}, "best_of"),
        (COMPLETIONS, {"best_of": 17}, "best_of"),
        (COMPLETIONS, {"logprobs": 6}, "logprobs"),
        (COMPLETIONS, {"max_tokens": 0}, "max_tokens"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "messages.0.content"),
        (CHAT, {"messages": [{"role": "user"}]}, "messages.0.content"),
        (CHAT, {"stop": ["a", "b", "c", "d", "e"]}, "stop"),
        (CHAT, {"stop": ""}, "stop"),
        (CHAT, {"max_tokens": 0}, "max_tokens"),
        (CHAT, {"stream_options": {"include_usage": True}}, "stream_options"),
        (COMPLETIONS, {"prompt": []}, "prompt"),
        (COMPLETIONS, {"prompt": ""}, "prompt"),
        (COMPLETIONS, {"prompt": {"text": "x"}}, "prompt"),
        (COMPLETIONS, {"prompt": ["a"] * 200}, "prompt"),
        (COMPLETIONS, {"prompt": [5, True]}, "prompt"),
    ],
)
def test_a_wrong_field_is_refused_by_name(path: str, fields: dict[str, Any], param: str) -> None:
    error = refusal(path, **fields)
    assert error["param"].startswith(param) and param in error["message"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (AdapterNotFound("no model 'x'"), 404, "model_not_found"),
        (AdapterFailed("adapter 'x' is for another base"), 424, None),
        (Overloaded("the queue is full"), 429, "rate_limit_exceeded"),
        (Incomplete("lost"), 500, None),
        (Unhealthy("no replica took the request"), 503, None),
    ],
)
def test_an_error_before_the_first_token_has_its_status(stream: bool, error: LorayError, status: int, code: str | None) -> None:
    response = post(ScriptedBackend([error]), CHAT, {"model": "x", "messages": HELLO, "stream": stream})
    assert response.status_code == status
    assert (response.json()["error"]["message"], response.json()["error"]["code"]) == (error.message, code)
    assert ("retry-after" in response.headers) == (status in (429, 503))


def test_an_error_within_a_stream_is_its_last_event() -> None:
    response = post(ScriptedBackend([*tokens_of("hello"), Incomplete("lost")]), CHAT, {"model": BASE, "messages": HELLO, "stream": True})
    last = json.loads(response.text.strip().split("\n\n")[-1].removeprefix("data: "))
    assert last == {"error": {"message": "lost", "type": "server_error", "param": None, "code": None}}


def test_a_model_without_a_template_says_so() -> None:
    service = service_of(saying("x"))
    service.tokenizer._tokenizer = type(HF)(tokenizer_object=HF.backend_tokenizer)
    response = send(service, "POST", CHAT, json={"model": BASE, "messages": HELLO})
    assert (response.status_code, "no chat template" in response.json()["error"]["message"]) == (400, True)


def user_saying(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


@pytest.mark.parametrize(
    ("path", "fields", "words"),
    [
        (CHAT, {"stop": ["a", "b", "c", "d", "e"]}, "stop: list should have at most 4 items"),
        (CHAT, {"stop": [""]}, "stop.0: string should have at least 1 character"),
        (CHAT, {"stop": ["a", 5]}, "stop.1: input should be a valid string"),
        (CHAT, {"stop": 5}, "stop: input should be a valid string"),
        (CHAT, {"messages": [user_saying([{"type": "text"}])]}, "messages.0.content.0.text: field required"),
        (CHAT, {"messages": [user_saying([{"type": "text", "text": 5}])]}, "messages.0.content.0.text: input should be a valid string"),
        (CHAT, {"messages": [user_saying([{"type": "text", "text": "a"}, 5])]}, "messages.0.content.1: input should be a valid"),
        (CHAT, {"messages": [user_saying([{"type": "image_url", "image_url": {}}])]}, "messages.0.content.0.type: input should be 'text'"),
        (CHAT, {"messages": [user_saying(5)]}, "messages.0.content: input should be a valid string"),
        (CHAT, {"metadata": {str(number): "" for number in range(17)}}, "metadata: has 17 entries, more than 16"),
        (CHAT, {"list": 5, "str": 5}, "list: unknown field; str: unknown field"),
        (COMPLETIONS, {"prompt": ["x"] * 129}, "prompt: list should have at most 128 items"),
        (COMPLETIONS, {"prompt": [[5]] * 129}, "prompt: list should have at most 128 items"),
        (COMPLETIONS, {"prompt": []}, "prompt: list should have at least 1 item"),
        (COMPLETIONS, {"prompt": [[]]}, "prompt.0: list should have at least 1 item"),
        (COMPLETIONS, {"prompt": ["a"] * 20 + [5]}, "prompt.20: input should be a valid string"),
        (COMPLETIONS, {"prompt": [5] * 20 + ["a"]}, "prompt.20: input should be a valid integer"),
        (COMPLETIONS, {"prompt": [[5]] * 20 + [[5, "a"]]}, "prompt.20.1: input should be a valid integer"),
        (COMPLETIONS, {"prompt": [["a"]]}, "prompt.0.0: input should be a valid integer"),
    ],
)
def test_of_a_field_with_several_forms_the_reason_is_of_the_form_that_it_has(path: str, fields: dict[str, Any], words: str) -> None:
    error = refusal(path, **fields)
    assert error["message"].startswith(words) and error["param"] == words.partition(":")[0]
    assert "; messages.0.content: " not in error["message"], "other forms say nothing of it"
