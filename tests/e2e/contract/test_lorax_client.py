"""LoRAX's own client, unmodified, against the served application: every method, every parameter, greedy tokens as transformers has them."""

import asyncio
import inspect
import json
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import lorax
import pytest
from lorax.errors import GenerationError, ValidationError
from lorax.types import Response, StreamResponse

from tests.e2e.conftest import App
from tests.e2e.oracle import Oracle
from tests.e2e.patience import PATIENCE_S

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:The `dict` method is deprecated")]  # in the client itself

PROMPT = "hello world, this is"
POINT = {
    "type": "object",
    "properties": {"x": {"type": "integer", "minimum": -99, "maximum": 99}, "hue": {"enum": ["rot", "grün"]}},
    "required": ["x", "hue"],
    "additionalProperties": False,
}
# Of every parameter a value that is not its default.
EVERY: dict[str, Any] = {
    "adapter_id": "a8",
    "adapter_source": "local",
    "api_token": "unneeded",
    "do_sample": True,
    "max_new_tokens": 12,
    "ignore_eos_token": True,
    "repetition_penalty": 1.2,
    "return_full_text": True,
    "seed": 5,
    "stop_sequences": ["zzz"],
    "temperature": 1.5,
    "top_k": 50,
    "top_p": 0.95,
    "truncate": 4,
    "typical_p": 0.9,
    "watermark": True,
    "details": True,
    "return_k_alternatives": 3,
    "decoder_input_details": True,
    "best_of": 1,
}
ELSEWHERE = {"self", "prompt", "merged_adapters", "response_format"}  # parameters with a test of their own
NOT_STREAMED = {"decoder_input_details", "best_of"}


class Clients:
    """The same call by each door; they must agree."""

    def __init__(self, url: str) -> None:
        self.sync = lorax.Client(url, timeout=PATIENCE_S)
        self.asynchronous = lorax.AsyncClient(url, timeout=PATIENCE_S)

    def generate(self, **parameters: Any) -> Response:
        response = self.sync.generate(PROMPT, **parameters)
        again = asyncio.run(self.asynchronous.generate(PROMPT, **parameters))
        assert (again.generated_text, ids(again)) == (response.generated_text, ids(response))
        return response

    def stream(self, **parameters: Any) -> list[StreamResponse]:
        async def events() -> list[StreamResponse]:
            return [event async for event in self.asynchronous.generate_stream(PROMPT, **parameters)]

        again = asyncio.run(events())
        parameters.pop("return_k_alternatives", None)  # the one that only the asynchronous stream has
        found = list(self.sync.generate_stream(PROMPT, **parameters))
        assert [event.token.id for event in found] == [event.token.id for event in again]
        return again


def ids(response: Response) -> list[int]:
    return [token.id for token in response.details.tokens]


@pytest.fixture(scope="module")
def clients(app: App) -> Clients:
    return Clients(app.url)


@pytest.mark.parametrize("adapter_id", [None, "a4", "a8"])
def test_greedy_tokens_are_those_of_transformers(clients: Clients, oracle: Oracle, adapter_id: str | None) -> None:
    wanted = {"adapter_id": adapter_id, "max_new_tokens": 16, "ignore_eos_token": True}
    response = clients.generate(**wanted)
    events = clients.stream(**wanted)
    oracle.assert_greedy(adapter_id or "", oracle.tokenizer(PROMPT)["input_ids"], ids(response))
    assert [event.token.id for event in events] == ids(response) and len(ids(response)) == 16
    assert events[-1].generated_text == response.generated_text and events[-1].details.generated_tokens == 16


def test_no_parameter_of_the_client_is_forgotten_here() -> None:
    for client in (lorax.Client, lorax.AsyncClient):
        assert inspect.signature(client.generate).parameters.keys() == EVERY.keys() | ELSEWHERE
        assert inspect.signature(client.generate_stream).parameters.keys() <= EVERY.keys() | ELSEWHERE


def test_every_parameter_at_once_is_honoured_by_every_door(clients: Clients, oracle: Oracle) -> None:
    response = clients.generate(**EVERY)
    details = response.details
    assert response.generated_text.startswith(PROMPT) and details.seed == 5
    assert [token.id for token in details.prefill] == oracle.tokenizer(PROMPT)["input_ids"][-4:]
    assert details.prefill[0].logprob is None and all(token.logprob < 0 for token in details.prefill[1:])
    assert all(len(token.alternative_tokens) == 3 for token in details.tokens)
    events = clients.stream(**{name: value for name, value in EVERY.items() if name not in NOT_STREAMED})
    assert [event.token.id for event in events] == ids(response)
    assert all(len(event.token.alternative_tokens) == 3 for event in events)
    assert events[-1].generated_text == response.generated_text


@pytest.mark.parametrize(
    "name", ["seed", "temperature", "top_k", "top_p", "typical_p", "repetition_penalty", "watermark", "truncate", "adapter_id"]
)
def test_each_parameter_alone_changes_what_comes(clients: Clients, name: str) -> None:
    """Strong values, so that none can hide."""
    strong = {"seed": 6, "temperature": 0.2, "top_k": 2, "top_p": 0.1, "typical_p": 0.1, "repetition_penalty": 5.0, "watermark": True}
    strong |= {"truncate": 1, "adapter_id": "a4"}
    plain = {"do_sample": True, "seed": 5, "max_new_tokens": 24, "ignore_eos_token": True}
    changed = clients.sync.generate(PROMPT, **{**plain, name: strong[name]})
    assert ids(changed) != ids(clients.sync.generate(PROMPT, **plain))


def test_the_best_of_two_is_the_more_probable(clients: Clients) -> None:
    response = clients.sync.generate(PROMPT, best_of=2, do_sample=True, max_new_tokens=8, ignore_eos_token=True)
    (other,) = response.details.best_of_sequences
    means = [sum(token.logprob for token in tokens) / 8 for tokens in (response.details.tokens, other.tokens)]
    assert means[0] > means[1] and response.details.seed != other.seed


def test_merged_adapters_are_an_adapter(clients: Clients) -> None:
    alone = clients.generate(adapter_id="a4", max_new_tokens=8, ignore_eos_token=True)
    merged = lorax.MergedAdapters(ids=["a4", "a8"], weights=[1.0, 0.0], density=1.0, merge_strategy="linear")
    assert ids(clients.generate(merged_adapters=merged, max_new_tokens=8, ignore_eos_token=True)) == ids(alone)
    assert [event.token.id for event in clients.stream(merged_adapters=merged, max_new_tokens=8, ignore_eos_token=True)] == ids(alone)


@pytest.mark.parametrize("adapter_id", [None, "a8"])
def test_a_response_format_is_kept_to(clients: Clients, adapter_id: str | None) -> None:
    wanted: dict[str, Any] = {"response_format": {"type": "json_object", "schema": POINT}, "adapter_id": adapter_id}
    wanted |= {"do_sample": True, "seed": 1, "max_new_tokens": 200}
    response = clients.generate(**wanted)
    jsonschema.validate(json.loads(response.generated_text), POINT)
    assert clients.stream(**wanted)[-1].generated_text == response.generated_text


def test_a_stop_sequence_ends_and_stays(clients: Clients) -> None:
    text = clients.sync.generate(PROMPT, max_new_tokens=32, ignore_eos_token=True).generated_text
    stop = text[6:8]
    response = clients.generate(max_new_tokens=500, ignore_eos_token=True, stop_sequences=[stop])
    assert response.generated_text == text[: text.index(stop) + len(stop)] and response.details.finish_reason == "stop_sequence"


def test_an_embedding_and_the_refusal_of_classes(clients: Clients) -> None:
    vector = clients.sync.embed(PROMPT).embeddings
    assert len(vector) == 48 and asyncio.run(clients.asynchronous.embed(PROMPT)).embeddings == vector
    for classify in (lambda: clients.sync.classify(PROMPT), lambda: clients.sync.classify_batch([PROMPT])):
        with pytest.raises(ValidationError, match="does not classify"):
            classify()


def test_errors_are_the_clients_own_and_tell_what_is_wrong(clients: Clients) -> None:
    refusals: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"adapter_id": "nobody"}, GenerationError, "nobody"),
        ({"max_new_tokens": 10**6}, ValidationError, "max_new_tokens"),
        ({"response_format": {"type": "json_object", "schema": {"type": "strin"}}}, ValidationError, "response_format"),
    ]
    for parameters, error, word in refusals:
        with pytest.raises(error, match=word):
            clients.sync.generate(PROMPT, **parameters)
        with pytest.raises(error, match=word):
            clients.stream(**parameters)
