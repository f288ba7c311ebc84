"""How OpenAI's fields reach the model, and log-probabilities, echoes and several choices come back."""

import json
import math
from typing import Any

import openai
import pytest

from loray.deployments.http_app import make_app
from loray.deployments.openai_docs import ChatCompletion, Completion, EmbeddingList, ModelList
from loray.deployments.request import GenerationRequest
from loray.models.step import Sampling
from tests.deployments.live_server import live
from tests.deployments.scripted_backend import BASE, EOS_ID, HF, ScriptedBackend, post, saying, send, service_of, tokens_of

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
HELLO: list[Any] = [{"role": "user", "content": "hello"}]


class SaysItsSeed(ScriptedBackend):
    """Each sequence writes a digit, its seed's last, and is the more probable the larger that is."""

    def __init__(self) -> None:
        super().__init__([])

    def script_of(self, request: GenerationRequest) -> list[list[int] | Exception]:
        return [*tokens_of(str(request.sampling.seed % 10)), [EOS_ID]]

    def logprob_of(self, request: GenerationRequest) -> float:
        return request.sampling.seed % 10 - 10.0


def answer(backend: ScriptedBackend, path: str, **fields: Any) -> dict[str, Any]:
    asked: dict[str, Any] = {"messages": HELLO} if path == CHAT else {"prompt": "hello"}
    response = post(backend, path, {"model": BASE, **asked, **fields})
    assert response.status_code == 200, response.text
    return response.json()


def chunks(backend: ScriptedBackend, path: str, **fields: Any) -> list[dict[str, Any]]:
    asked: dict[str, Any] = {"messages": HELLO} if path == CHAT else {"prompt": "hello"}
    response = post(backend, path, {"model": BASE, **asked, "stream": True, **fields})
    return [json.loads(event.removeprefix("data: ")) for event in response.text.split("\n\n")[:-2]]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_every_field_reaches_the_model(path: str) -> None:
    backend = saying("x")
    fields = {
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "repetition_penalty": 1.1,
        "logit_bias": {"5": -100, "7": 2.5},
        "min_tokens": 3,
        "stop_token_ids": [9, 8],
        "temperature": 0,
        "top_k": 5,
        "seed": 3,
    }
    answer(backend, path, **fields)
    (request,) = backend.requests
    assert request.stop_token_ids == [9, 8]
    assert request.sampling == Sampling(
        presence_penalty=0.5, frequency_penalty=-0.5, repetition_penalty=1.1, logit_bias={5: -100, 7: 2.5}, min_new_tokens=3
    )


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_each_choice_has_the_next_seed(path: str) -> None:
    backend = SaysItsSeed()
    choices = answer(backend, path, n=3, seed=5)["choices"]
    assert [choice["index"] for choice in choices] == [0, 1, 2]
    assert [choice["text"] if path == COMPLETIONS else choice["message"]["content"] for choice in choices] == ["5", "6", "7"]
    answer(backend, path, n=3)
    assert len({request.sampling.seed for request in backend.requests}) == 6


def test_the_choices_of_several_prompts_follow_one_another() -> None:
    got = answer(SaysItsSeed(), COMPLETIONS, prompt=["a", "b"], n=2, seed=3)
    assert [(choice["index"], choice["text"]) for choice in got["choices"]] == [(0, "3"), (1, "4"), (2, "3"), (3, "4")]
    assert got["usage"] == {"prompt_tokens": 2, "completion_tokens": 8, "total_tokens": 10}


def test_the_most_probable_of_the_best_are_answered() -> None:
    got = answer(SaysItsSeed(), COMPLETIONS, n=2, best_of=4, seed=1, prompt=["a", "b"])
    assert [(choice["index"], choice["text"]) for choice in got["choices"]] == [(0, "4"), (1, "3"), (2, "4"), (3, "3")]
    assert got["usage"]["completion_tokens"] == 16


def test_the_best_is_the_most_probable_by_token_whatever_its_length() -> None:
    class ShortOrLong(SaysItsSeed):
        """The first has one token less probable than each of the second's, and fewer of them."""

        def script_of(self, request: GenerationRequest) -> list[list[int] | Exception]:
            return [*tokens_of("a" if request.sampling.seed == 1 else "b b b b b b"), [EOS_ID]]

        def logprob_of(self, request: GenerationRequest) -> float:
            return -1.0 if request.sampling.seed == 1 else -0.9

    assert [choice["text"] for choice in answer(ShortOrLong(), COMPLETIONS, best_of=2, seed=1)["choices"]] == ["b b b b b b"]


def test_each_streamed_choice_begins_with_its_role() -> None:
    got = [chunk["choices"][0] for chunk in chunks(SaysItsSeed(), CHAT, n=2, seed=3)]
    for index, text in ((0, "3"), (1, "4")):
        mine = [choice for choice in got if choice["index"] == index]
        assert mine[0]["delta"]["role"] == "assistant" and mine[-1]["finish_reason"] == "stop"
        assert "".join(choice["delta"].get("content", "") for choice in mine) == text


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_a_lost_choice_ends_them_all(path: str) -> None:
    class SecondFails(SaysItsSeed):
        def script_of(self, request: GenerationRequest) -> list[list[int] | Exception]:
            return [*tokens_of("hello"), RuntimeError("lost")] if request.sampling.seed == 4 else tokens_of("hello" * 20)

    backend = SecondFails()
    asked: dict[str, Any] = {"messages": HELLO} if path == CHAT else {"prompt": "hello"}
    assert post(backend, path, {"model": BASE, **asked, "n": 3, "seed": 3}).status_code == 500
    assert len(backend.endings) == 3


@pytest.mark.parametrize("stream", [False, True])
def test_a_chats_logprobs_have_bytes_and_alternatives(stream: bool) -> None:
    backend = saying("grüße")
    if stream:
        got = [choice for chunk in chunks(backend, CHAT, logprobs=True, top_logprobs=2) for choice in chunk["choices"]]
        content = [entry for choice in got if choice["logprobs"] for entry in choice["logprobs"]["content"]]
    else:
        content = answer(backend, CHAT, logprobs=True, top_logprobs=2)["choices"][0]["logprobs"]["content"]
    assert backend.requests[0].sampling.num_alternatives == 2
    assert b"".join(bytes(entry["bytes"]) for entry in content).decode() == "grüße"
    assert all(entry["logprob"] == -0.5 and len(entry["top_logprobs"]) == 2 for entry in content)
    assert all(other.keys() == {"token", "logprob", "bytes"} for entry in content for other in entry["top_logprobs"])


def test_a_chat_without_logprobs_has_none() -> None:
    backend = saying("x")
    assert answer(backend, CHAT)["choices"][0]["logprobs"] is None
    assert backend.requests[0].sampling.num_alternatives == 0


@pytest.mark.parametrize("stream", [False, True])
def test_a_completions_logprobs_are_lists_beside_each_other(stream: bool) -> None:
    backend = saying("hello world")
    if stream:
        parts = [chunk["choices"][0] for chunk in chunks(backend, COMPLETIONS, logprobs=2)]
        got: dict[str, list[Any]] = {name: [] for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")}
        for part in parts:
            for name in got:
                got[name] += part["logprobs"][name]
    else:
        got = answer(backend, COMPLETIONS, logprobs=2)["choices"][0]["logprobs"]
    tokens = [*(HF.decode(ids) for ids in tokens_of("hello world")), HF.eos_token]
    assert got["tokens"] == tokens and got["token_logprobs"] == [-0.5] * len(tokens)
    assert got["text_offset"] == [len("".join(tokens[:place])) for place in range(len(tokens))]
    assert all(token in top and len(top) <= 3 for token, top in zip(tokens, got["top_logprobs"], strict=True))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", ["world 日本", HF.encode("world 日本")])
def test_an_echo_puts_the_prompt_before_the_text(prompt: Any, stream: bool) -> None:
    fields = {"prompt": prompt, "echo": True, "logprobs": 0}
    choices = (
        [chunk["choices"][0] for chunk in chunks(saying("!"), COMPLETIONS, **fields)]
        if stream
        else answer(saying("!"), COMPLETIONS, **fields)["choices"]
    )
    assert "".join(choice["text"] for choice in choices) == "world 日本!"
    first = choices[0]["logprobs"]
    num_prompt = len(HF.encode("world 日本"))
    assert first["token_logprobs"][:num_prompt] == [None, *(-float(place) for place in range(1, num_prompt))]
    assert first["top_logprobs"][0] is None and "".join(first["tokens"][:2]) == "world" and len(first["tokens"]) >= num_prompt


def test_an_echo_alone_is_the_prompts_logprobs() -> None:
    backend = saying("never told")
    got = answer(backend, COMPLETIONS, echo=True, logprobs=1, max_tokens=0, prompt="hello world")
    (choice,) = got["choices"]
    assert (choice["text"], choice["finish_reason"], got["usage"]["completion_tokens"]) == ("hello world", "length", 0)
    assert "".join(choice["logprobs"]["tokens"]) == "hello world"
    assert (backend.requests[0].max_new_tokens, backend.requests[0].wants_prompt_logprobs) == (1, True)


@pytest.mark.parametrize(("echo", "num"), [(True, 2), (False, 0)])
def test_alternatives_to_the_prompt_are_asked_for_where_they_are_told(echo: bool, num: int) -> None:
    backend = saying("!")
    got = answer(backend, COMPLETIONS, echo=echo, logprobs=2, max_tokens=3)["choices"][0]["logprobs"]["top_logprobs"]
    sampling = backend.requests[0].sampling
    assert (sampling.num_alternatives, sampling.num_prompt_alternatives) == (2, num)
    assert all(len(top) == 2 for top in got[echo:]), "the first of a prompt has none"


def test_an_echo_without_logprobs_asks_for_none() -> None:
    backend = saying("!")
    (choice,) = answer(backend, COMPLETIONS, echo=True)["choices"]
    assert (choice["text"], choice["logprobs"], backend.requests[0].wants_prompt_logprobs) == ("hello!", None, False)


def test_the_usage_so_far_may_come_with_every_chunk() -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    usages = [chunk["usage"]["completion_tokens"] for chunk in chunks(saying("hello"), CHAT, stream_options=options)]
    assert usages == sorted(usages) and usages[-1] == len(HF.encode("hello")) + 1 and len(set(usages)) > 1


def test_many_sequences_of_one_request_take_turns() -> None:
    class Counting(ScriptedBackend):
        running = most = 0

        async def generate(self, request):  # type: ignore[no-untyped-def]
            self.running += 1
            self.most = max(self.most, self.running)
            try:
                async for event in super().generate(request):
                    yield event
            finally:
                self.running -= 1

    backend = Counting([*tokens_of("hello"), [EOS_ID]])
    service = service_of(backend, scheduler={"max_waiting": 4})
    response = send(service, "POST", COMPLETIONS, json={"model": BASE, "prompt": ["a"] * 6, "n": 3})
    assert len(response.json()["choices"]) == 18 and backend.most == 4


@pytest.mark.parametrize(
    ("header", "token"), [("Bearer hf_secret", "hf_secret"), ("Bearer sk-of-another-service", ""), ("Bearer none", "")]
)
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, "/v1/embeddings"])
def test_only_a_token_of_the_hub_is_used_for_adapters(path: str, header: str, token: str) -> None:
    backend = saying("x")
    asked = {CHAT: {"messages": HELLO}, COMPLETIONS: {"prompt": "x"}, "/v1/embeddings": {"input": "x"}}[path]
    send(service_of(backend), "POST", path, json={"model": "pirate", **asked}, headers={"Authorization": header})
    assert backend.requests[0].adapter and backend.requests[0].adapter.api_token == token
    send(service_of(backend), "POST", path, json={"model": "pirate", "api_token": "own", **asked}, headers={"Authorization": header})
    assert backend.requests[1].adapter and backend.requests[1].adapter.api_token == "own"


def test_every_answer_names_what_made_it() -> None:
    first, second = (answer(saying("x"), CHAT)["system_fingerprint"] for _ in range(2))
    assert first == second and first.startswith("fp_")
    assert chunks(saying("x"), COMPLETIONS)[0]["system_fingerprint"] == first


def test_answers_are_as_documented() -> None:
    fields = {"n": 2, "seed": 3, "temperature": 1}
    ChatCompletion.model_validate(answer(saying("x"), CHAT, logprobs=True, top_logprobs=2, **fields), strict=True, extra="forbid")
    Completion.model_validate(answer(saying("x"), COMPLETIONS, logprobs=2, echo=True, **fields), strict=True, extra="forbid")
    service = service_of(saying("x"))
    EmbeddingList.model_validate(post(saying("x"), "/v1/embeddings", {"model": BASE, "input": "x"}).json(), strict=True, extra="forbid")
    ModelList.model_validate(send(service, "GET", "/v1/models").json(), strict=True, extra="forbid")
    paths = send(service, "GET", "/openapi.json").json()["paths"]
    for path in (CHAT, COMPLETIONS):
        assert paths[path]["post"]["responses"]["200"]["content"].keys() == {"application/json", "text/event-stream"}


def test_the_openai_client_reads_logprobs_of_all_kinds() -> None:
    with live(make_app(service_of(saying("hello world")))) as address:
        client = openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)
        chat = client.chat.completions.create(model=BASE, messages=HELLO, logprobs=True, top_logprobs=3, n=2, logit_bias={"5": -100})
        text = client.completions.create(model=BASE, prompt="hello", logprobs=3, echo=True, best_of=2, max_tokens=4)
    assert len(chat.choices) == 2 and chat.choices[1].logprobs and chat.choices[1].logprobs.content
    assert all(math.isfinite(other.logprob) for token in chat.choices[1].logprobs.content for other in token.top_logprobs)
    assert text.choices[0].logprobs and text.choices[0].logprobs.token_logprobs and text.choices[0].logprobs.token_logprobs[0] is None
