"""That bodies of OpenAI requests which are large and wrong are refused for little work."""

from typing import Any

import pytest
from pydantic import ValidationError

from loray.deployments.openai_request import MAX_BIASES, MAX_MESSAGES, Body, ChatBody, CompletionBody, EmbeddingBody
from loray.deployments.tokenizer import Tokenizer
from tests.deployments.scripted_backend import BASE, HF, MAX_TOTAL_TOKENS, post, saying, send, service_of

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
