"""That OpenAI requests which are large and wrong are refused for little work, and that large answers hold nobody up."""

import threading
from typing import Any

import pytest
from openai.types import completion_create_params as text_params
from openai.types.chat import completion_create_params as chat_params
from pydantic import ValidationError

from loray.deployments import completion_plan, json_answer
from loray.deployments.openai_embedding_request import EmbeddingBody
from loray.deployments.openai_request import MAX_BIASES, MAX_MESSAGES, MAX_PROMPTS, Body, ChatBody, CompletionBody
from loray.deployments.tokenizer import Tokenizer
from tests.deployments.scripted_backend import BASE, HF, MAX_TOTAL_TOKENS, ScriptedBackend, post, saying, send, service_of, tokens_of

HELLO: dict[str, Any] = {"role": "user", "content": "hello"}
MANY = 5000


@pytest.mark.parametrize(
    ("body", "fields"),
    [
        (ChatBody, {"messages": [{}] * MANY}),
        (ChatBody, {"messages": [HELLO] * (MAX_MESSAGES + 1)}),
        (ChatBody, {"messages": [{"role": "user", "content": [{}] * MANY}]}),
        (ChatBody, {"messages": [{"role": "assistant", "tool_calls": [{}] * MANY, "content": "x"}]}),
        (ChatBody, {"messages": [HELLO], "tools": [{}] * MANY}),
        (ChatBody, {"messages": [HELLO], "stop": [1] * MANY}),
        (ChatBody, {"messages": [HELLO], "stop_token_ids": ["x"] * MANY}),
        (ChatBody, {"messages": [HELLO], "logit_bias": {str(token_id): "x" for token_id in range(MAX_BIASES + 1)}}),
        (ChatBody, {"messages": [HELLO], "metadata": {str(number): number for number in range(MANY)}}),
        (CompletionBody, {"prompt": [{}] * MANY}),
        (CompletionBody, {"prompt": [["x"] * MANY] * 2}),
        (CompletionBody, {"prompt": [""] * MANY}),
        (EmbeddingBody, {"input": [{}] * MANY}),
    ],
)
def test_the_first_wrong_items_are_enough(body: type[Body], fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError) as refusal:
        body.model_validate({"model": BASE, **fields})
    assert refusal.value.error_count() <= 8


def test_as_many_messages_as_may_be_are_accepted() -> None:
    ChatBody.model_validate({"model": BASE, "messages": [HELLO] * MAX_MESSAGES})


def test_a_prompt_that_is_too_long_is_not_decoded_for_its_echo() -> None:
    class Noting(Tokenizer):
        def decode(self, token_ids: list[int]) -> str:
            decoded.append(token_ids)
            return super().decode(token_ids)

    decoded: list[list[int]] = []
    prompt = [5] * MAX_TOTAL_TOKENS
    service = service_of(saying("x"))
    service.tokenizer = Noting(HF)
    response = send(service, "POST", "/v1/completions", json={"model": BASE, "prompt": prompt, "echo": True})
    assert (response.status_code, decoded) == (400, [])


@pytest.mark.parametrize("token_id", [-1, len(HF)])
def test_a_token_id_that_the_model_does_not_have_is_named(token_id: int) -> None:
    response = post(saying("x"), "/v1/completions", {"model": BASE, "prompt": [5, token_id, 6]})
    assert (response.status_code, f"prompt: {token_id} is not a token id" in response.text) == (400, True)


def test_a_request_has_only_so_many_sequences_in_all() -> None:
    def ask(num_prompts: int, **fields: Any) -> Any:
        return post(saying("x"), "/v1/completions", {"model": BASE, "prompt": ["a"] * num_prompts, **fields})

    assert len(ask(8, n=16).json()["choices"]) == ask(MAX_PROMPTS).text.count('"index"') == MAX_PROMPTS == 128
    for refused in (ask(9, n=15), ask(65, best_of=2)):
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "prompt")
        assert "more than 128 sequences" in refused.json()["error"]["message"]


def test_as_many_choices_of_one_prompt_as_the_server_allows_are_made() -> None:
    service = service_of(saying("x"), limits={"max_choices": MAX_PROMPTS + 2})
    response = send(service, "POST", "/v1/completions", json={"model": BASE, "prompt": "a", "n": MAX_PROMPTS + 2})
    assert len(response.json()["choices"]) == MAX_PROMPTS + 2


def test_only_so_many_tokens_of_prompts_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(completion_plan, "MAX_SCORED_TOKENS", 10)
    body = {"model": BASE, "prompt": [[5] * 32] * 2, "max_tokens": 0, "echo": True}
    assert post(saying("x"), "/v1/completions", body | {"logprobs": 0}).status_code == 200, "a prompt of max_total_tokens always may"
    for fields in ({"prompt": [[5] * 32] * 3}, {"n": 2}):
        refused = post(saying("x"), "/v1/completions", body | {"logprobs": 0} | fields)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "echo")
        assert post(saying("x"), "/v1/completions", body | fields).status_code == 200


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "a " * 300, "echo": True, "logprobs": 1, "max_tokens": 1}),
        ("/v1/chat/completions", {"messages": [HELLO], "logprobs": True, "n": 16}),
        ("/v1/embeddings", {"input": ["a"] * 20}),
        ("/generate", {"inputs": "a " * 300, "parameters": {"decoder_input_details": True}}),
        ("/", {"inputs": "a " * 300, "parameters": {"decoder_input_details": True}}),
    ],
)
@pytest.mark.parametrize("is_large", [True, False])
def test_a_large_answer_is_written_off_the_event_loop(monkeypatch: pytest.MonkeyPatch, path: str, body: Any, is_large: bool) -> None:
    class Noted(json_answer.Response):
        def __init__(self, *args: Any, **options: Any) -> None:
            threads.append(threading.current_thread())
            super().__init__(*args, **options)

    class Wide(ScriptedBackend):
        @staticmethod
        def embedding_of(prompt_ids: list[int]) -> list[float]:
            return [0.5] * 1024

    threads: list[threading.Thread] = []
    monkeypatch.setattr(json_answer, "Response", Noted)
    service = service_of(Wide(tokens_of("a b " * 10), finish="length"))
    service.max_total_tokens = 1000
    if not is_large:
        small = {"prompt": "a", "inputs": "a", "input": "a", "n": 1}
        body = {name: small.get(name, value) for name, value in body.items()}
    base = {"model": BASE} if path.startswith("/v1") else {}
    response = send(service, "POST", path, json=base | body)
    assert response.status_code == 200 and response.headers["content-type"] == "application/json" and response.json()
    assert [thread is not threading.main_thread() for thread in threads] == [is_large]


NULLS = ["audio", "function_call", "functions", "moderation", "prediction", "prompt_cache_options", "web_search_options"]


def test_every_field_of_openais_client_may_be_null() -> None:
    for body, kind in ((ChatBody, chat_params.CompletionCreateParamsBase), (CompletionBody, text_params.CompletionCreateParamsBase)):
        given: dict[str, Any] = {"model": BASE, "messages": [HELLO]} if body is ChatBody else {"model": BASE, "prompt": "hello"}
        assert body.model_validate(dict.fromkeys(kind.__annotations__) | {"stream": None} | given)


@pytest.mark.parametrize("name", NULLS)
def test_what_is_not_supported_is_refused_by_name(name: str) -> None:
    body = {"model": BASE, "messages": [HELLO]}
    assert post(saying("x"), "/v1/chat/completions", body | {name: None}).status_code == 200
    refused = post(saying("x"), "/v1/chat/completions", body | {name: {}})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, name)
    assert "not supported by this server" in refused.json()["error"]["message"]
