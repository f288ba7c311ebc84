"""LoRAX's own client, unmodified, against the application on a real socket: every method and every parameter it has."""

import asyncio
import inspect
import json
from collections.abc import Iterator
from typing import Any

import lorax
import msgspec
import pytest
from lorax.errors import GenerationError, IncompleteGenerationError, OverloadedError, ValidationError
from lorax.types import FinishReason, Response, ResponseFormat, StreamResponse

from loray.deployments.errors import AdapterNotFound, Incomplete, Overloaded
from loray.deployments.http_app import make_app
from loray.deployments.request import AdapterRef, MergeRecipe
from loray.models.step import Sampling
from tests.deployments.live_server import live
from tests.deployments.scripted_backend import EOS_ID, HF, ScriptedBackend, service_of, tokens_of
from tests.deployments.tiny_grammars import random_text, shared_grammars

pytestmark = pytest.mark.filterwarnings("ignore:The `dict` method is deprecated")  # in the client itself

SAID = " world, this is"
# Of every parameter a value that is not its default.
GENERATE: dict[str, Any] = {
    "adapter_id": "pirate",
    "adapter_source": "local",
    "api_token": "t",
    "do_sample": True,
    "max_new_tokens": 9,
    "ignore_eos_token": True,
    "repetition_penalty": 1.2,
    "return_full_text": True,
    "seed": 5,
    "stop_sequences": ["zzz"],
    "temperature": 0.5,
    "top_k": 7,
    "top_p": 0.9,
    "truncate": 1,
    "typical_p": 0.8,
    "watermark": True,
    "details": True,
    "return_k_alternatives": 2,
}
WHOLE: dict[str, Any] = {**GENERATE, "decoder_input_details": True, "best_of": 1}
ELSEWHERE = {"self", "prompt", "merged_adapters", "response_format"}  # parameters with a test of their own


class Server:
    """The application on a socket; what its backend says is set by each test."""

    def __init__(self, url: str, backend: ScriptedBackend) -> None:
        self.url = url
        self.backend = backend
        self.client = lorax.Client(url, timeout=20)
        self.async_client = lorax.AsyncClient(url, timeout=20)

    def generate(self, door: str, prompt: str = "hello", **parameters: Any) -> Response:
        if door == "sync":
            return self.client.generate(prompt, **parameters)
        return asyncio.run(self.async_client.generate(prompt, **parameters))

    def stream(self, door: str, prompt: str = "hello", **parameters: Any) -> list[StreamResponse]:
        if door == "sync":
            return list(self.client.generate_stream(prompt, **parameters))

        async def events() -> list[StreamResponse]:
            return [event async for event in self.async_client.generate_stream(prompt, **parameters)]

        return asyncio.run(events())


@pytest.fixture(scope="module")
def shared() -> Iterator[Server]:
    backend = ScriptedBackend([])
    service = service_of(backend)
    service.grammars = shared_grammars()
    with live(make_app(service)) as url:
        yield Server(url, backend)


@pytest.fixture
def server(shared: Server) -> Server:
    shared.backend.script = [*tokens_of(SAID), [EOS_ID]]
    shared.backend.requests.clear()
    return shared


both = pytest.mark.parametrize("door", ["sync", "async"])


@both
def test_a_generation(server: Server, door: str) -> None:
    response = server.generate(door)
    assert (response.generated_text, response.details is not None) == (SAID, True)
    details = response.details
    assert details.finish_reason == FinishReason.EndOfSequenceToken and details.prefill == [] and details.seed is None
    assert (details.prompt_tokens, details.generated_tokens) == (len(HF.encode("hello")), len(details.tokens))
    assert "".join(token.text for token in details.tokens if not token.special) == SAID
    assert server.generate(door, details=False).details is None


@both
def test_a_stream(server: Server, door: str) -> None:
    *events, last = server.stream(door)
    assert "".join(event.token.text for event in events) == SAID
    assert all(event.generated_text is None and event.details is None for event in events)
    assert (last.generated_text, last.token.special, last.details.finish_reason) == (SAID, True, FinishReason.EndOfSequenceToken)
    assert last.details.generated_tokens == len(events) + 1


def test_no_parameter_of_the_client_is_forgotten_here() -> None:
    for client in (lorax.Client, lorax.AsyncClient):
        assert inspect.signature(client.generate).parameters.keys() == WHOLE.keys() | ELSEWHERE
        assert inspect.signature(client.generate_stream).parameters.keys() - {"return_k_alternatives"} <= GENERATE.keys() | ELSEWHERE


def taken(server: Server) -> tuple[Sampling, Any]:
    (request,) = server.backend.requests
    assert request.adapter == AdapterRef(adapter_id="pirate", source="local", api_token="t")
    assert (request.max_new_tokens, request.ignore_eos, len(request.prompt_ids)) == (9, True, 1)
    return request.sampling, request.wants_prompt_logprobs


SAMPLED = Sampling(temperature=0.5, top_k=7, top_p=0.9, seed=5, typical_p=0.8, repetition_penalty=1.2, watermark=True, num_alternatives=2)


@both
def test_every_parameter_of_a_generation_reaches_the_model(server: Server, door: str) -> None:
    response = server.generate(door, **WHOLE)
    assert taken(server) == (SAMPLED, True)
    assert response.generated_text == f"hello{SAID}" and response.details.seed == 5
    assert [(token.id, token.logprob) for token in response.details.prefill] == [(HF.encode("hello")[-1], None)]
    assert all(len(token.alternative_tokens) == 2 for token in response.details.tokens)


@both
def test_every_parameter_of_a_stream_reaches_the_model(server: Server, door: str) -> None:
    parameters = {name: value for name, value in GENERATE.items() if door == "async" or name != "return_k_alternatives"}
    *_, last = server.stream(door, **parameters)
    sampling, _ = taken(server)
    assert sampling == msgspec.structs.replace(SAMPLED, num_alternatives=2 if door == "async" else 0)
    assert (last.generated_text, last.details.seed) == (f"hello{SAID}", 5)


@both
def test_the_best_of_two(server: Server, door: str) -> None:
    response = server.generate(door, best_of=2, do_sample=True)
    (other,) = response.details.best_of_sequences
    assert (response.generated_text, other.generated_text, other.finish_reason) == (SAID, SAID, FinishReason.EndOfSequenceToken)
    assert {response.details.seed, other.seed} == {request.sampling.seed for request in server.backend.requests}


@both
def test_merged_adapters(server: Server, door: str) -> None:
    merged = lorax.MergedAdapters(ids=["pirate", "poet"], weights=[0.5, 1.5], density=0.5, merge_strategy="ties")
    server.generate(door, merged_adapters=merged)
    server.stream(door, merged_adapters=merged)
    recipe = MergeRecipe(adapter_ids=("pirate", "poet"), weights=(0.5, 1.5), strategy="ties", density=0.5)
    assert [request.adapter.merge for request in server.backend.requests if request.adapter] == [recipe, recipe]


@both
@pytest.mark.parametrize("as_dict", [True, False])
def test_a_response_format_constrains_the_model(server: Server, door: str, as_dict: bool) -> None:
    wanted: Any = {"type": "json_object", "schema": {"type": "object", "properties": {"name": {"const": "Ann"}}, "required": ["name"]}}
    server.generate(door, response_format=wanted if as_dict else ResponseFormat(**wanted))
    server.stream(door, response_format=wanted if as_dict else ResponseFormat(**wanted))
    first, second = (request.sampling.grammar for request in server.backend.requests)
    assert first == second and json.loads(random_text(first, seed=0) or "{}")["name"] == "Ann"


@both
def test_a_stop_sequence_stays_in_the_text(server: Server, door: str) -> None:
    response = server.generate(door, stop_sequences=["this"])
    assert (response.generated_text, response.details.finish_reason) == (" world, this", FinishReason.StopSequence)


@both
@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (AdapterNotFound("no adapter 'x'"), GenerationError),
        (Overloaded("the queue is full"), OverloadedError),
        (Incomplete("lost"), IncompleteGenerationError),
    ],
)
def test_an_error_is_the_clients_own(server: Server, door: str, error: Exception, raised: type[Exception]) -> None:
    server.backend.script = [error]
    with pytest.raises(raised, match=str(error)):
        server.generate(door, adapter_id="x")
    with pytest.raises(raised, match=str(error)):
        server.stream(door, adapter_id="x")
    server.backend.script = [*tokens_of(" world"), error]
    with pytest.raises(raised, match=str(error)):
        server.stream(door)


@both
def test_a_refusal_is_the_clients_validation_error(server: Server, door: str) -> None:
    with pytest.raises(ValidationError, match="max_new_tokens"):
        server.generate(door, max_new_tokens=10**6)
    with pytest.raises(ValidationError, match="adapter_source"):
        server.stream(door, adapter_source="pbase")
    assert server.backend.requests == []


def test_an_embedding(server: Server) -> None:
    vector = ScriptedBackend.embedding_of(HF.encode("hello"))
    assert server.client.embed("hello").embeddings == vector
    assert asyncio.run(server.async_client.embed("hello")).embeddings == vector


def test_classification_is_a_validation_error(server: Server) -> None:
    with pytest.raises(ValidationError, match="does not classify"):
        server.client.classify("hello")
    with pytest.raises(ValidationError, match="does not classify"):
        server.client.classify_batch(["hello", "you"])
    with pytest.raises(ValidationError, match="does not classify"):
        asyncio.run(server.async_client.classify("hello"))


def test_headers_given_to_the_client_open_adapters(server: Server) -> None:
    client = lorax.Client(server.url, headers={"Authorization": "Bearer mine"})
    client.generate("hello", adapter_id="org/poet", adapter_source="hub")
    assert server.backend.requests[0].adapter == AdapterRef(adapter_id="org/poet", source="hub", api_token="mine")
