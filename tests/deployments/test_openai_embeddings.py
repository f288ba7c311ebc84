import asyncio
import base64
import struct
from collections.abc import AsyncGenerator, Iterator
from typing import Any

import openai
import pytest

from loray.deployments.errors import AdapterNotFound, Incomplete, InvalidRequest, LorayError
from loray.deployments.http_app import make_app
from loray.deployments.openai import MAX_AT_ONCE
from loray.deployments.request import GenerationRequest, TokenEvent
from tests.deployments.live_server import live
from tests.deployments.scripted_backend import BASE, HF, ScriptedBackend, post, send, service_of

EMBEDDINGS = "/v1/embeddings"
vector = ScriptedBackend.embedding_of


def create(backend: ScriptedBackend, **fields: Any) -> dict[str, Any]:
    response = post(backend, EMBEDDINGS, {"model": BASE, **fields})
    assert response.status_code == 200, response.text
    return response.json()


def refusal(**fields: Any) -> dict[str, Any]:
    backend = ScriptedBackend([])
    response = post(backend, EMBEDDINGS, {"model": BASE, "input": "hello", **fields})
    assert (response.status_code, backend.requests) == (400, [])
    return response.json()["error"]


@pytest.fixture(scope="module")
def client() -> Iterator[openai.OpenAI]:
    with live(make_app(service_of(ScriptedBackend([])))) as address:
        yield openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)


@pytest.mark.parametrize("options", [{}, {"encoding_format": "float"}])
def test_the_openai_client_embeds(client: openai.OpenAI, options: Any) -> None:
    """Without the option it asks for base64 and unpacks it."""
    answer = client.embeddings.create(model=BASE, input=["hello", "world, this"], **options)
    token_ids = [HF.encode("hello"), HF.encode("world, this")]
    assert [(item.object, item.index, item.embedding) for item in answer.data] == [
        ("embedding", index, vector(ids)) for index, ids in enumerate(token_ids)
    ]
    num_tokens = sum(map(len, token_ids))
    assert (answer.object, answer.model, answer.usage.prompt_tokens, answer.usage.total_tokens) == ("list", BASE, num_tokens, num_tokens)


def test_the_openai_client_sees_the_error_kinds(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="dimensions"):
        client.embeddings.create(model=BASE, input="x", dimensions=8)
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model="", input="x")


def test_base64_is_of_little_endian_float32() -> None:
    (item,) = create(ScriptedBackend([]), input="hello", encoding_format="base64")["data"]
    assert list(struct.unpack("<3f", base64.b64decode(item["embedding"]))) == vector(HF.encode("hello"))


@pytest.mark.parametrize(
    ("field", "prompts"),
    [
        ("hello", [HF.encode("hello")]),
        ([5, 6, 7], [[5, 6, 7]]),
        (["hello"], [HF.encode("hello")]),
        ([[5, 6], [7]], [[5, 6], [7]]),
    ],
)
def test_the_input_may_be_texts_or_token_ids(field: Any, prompts: list[list[int]]) -> None:
    backend = ScriptedBackend([])
    answer = create(backend, input=field)
    assert [request.prompt_ids for request in backend.requests] == prompts
    assert [item["embedding"] for item in answer["data"]] == [vector(prompt) for prompt in prompts]
    assert answer["usage"] == {"prompt_tokens": sum(map(len, prompts)), "total_tokens": sum(map(len, prompts))}


@pytest.mark.parametrize(("model", "adapter_id"), [(BASE, ""), ("org/poet", "org/poet"), (f"{BASE}:pirate", "pirate")])
def test_the_model_names_the_base_or_an_adapter(model: str, adapter_id: str) -> None:
    backend = ScriptedBackend([])
    assert create(backend, model=model, input="x")["model"] == model
    assert backend.requests[0].adapter_id == adapter_id


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"input": ""}, "input", "at least one token"),
        ({"input": []}, "input", "at least one item"),
        ({"input": [[]]}, "input", "at least one token"),
        ({"input": ["a", "", "b"]}, "input.1", "at least one token"),
        ({"input": ["a", "hello " * 100]}, "input.1", "more than max_total_tokens"),
        ({"input": [[1], [100_000]]}, "input.1", "100000 is not a token id"),
        ({"input": [-1]}, "input", "-1 is not a token id"),
        ({"input": ["a"] * 2049}, "input", "2049 items, more than 2048"),
        ({"input": ["a", [1]]}, "input", "list of such texts or of lists of token ids"),
        ({"input": {"text": "a"}}, "input", "must be a text"),
        ({"input": None}, "input", "must be a text"),
        ({"dimensions": 8}, "dimensions", "not supported"),
        ({"encoding_format": "int8"}, "encoding_format", "base64"),
        ({"adapter_source": "ftp"}, "adapter_source", "not supported"),
        ({"temperature": 1}, "temperature", "unknown field"),
    ],
)
def test_a_wrong_field_is_refused_by_name(fields: dict[str, Any], param: str, says: str) -> None:
    error = refusal(**fields)
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert error["message"].startswith(f"{param}: ") and says in error["message"]


class Crowd(ScriptedBackend):
    """Answers nobody until `size` requests are there at once, then the latest first."""

    def __init__(self, size: int) -> None:
        super().__init__([])
        self.size = size
        self.most = 0
        self.doors: list[asyncio.Event] = []

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[TokenEvent, None]:
        door = asyncio.Event()
        self.doors.append(door)
        self.most = max(self.most, len(self.doors))
        if len(self.doors) == self.size:
            asyncio.get_running_loop().call_soon(door.set)  # after everybody who is already on the way
        await door.wait()
        self.doors.remove(door)
        if self.doors:
            self.doors[-1].set()
        async for event in super().generate(request):
            yield event


def test_inputs_run_at_once_and_are_answered_in_their_order() -> None:
    answer = create(backend := Crowd(3), input=["a", "b c", "d e f"])
    assert [item["index"] for item in answer["data"]] == [0, 1, 2]
    assert [item["embedding"] for item in answer["data"]] == [vector(HF.encode(text)) for text in ("a", "b c", "d e f")]
    assert [request.prompt_ids for request in backend.requests] == [HF.encode(text) for text in ("d e f", "b c", "a")]


@pytest.mark.parametrize(("max_waiting", "of_adapter", "expected"), [(1024, 256, MAX_AT_ONCE), (3, 256, 3), (1024, 3, 3)])
def test_one_call_does_not_fill_the_queue(max_waiting: int, of_adapter: int, expected: int) -> None:
    backend = Crowd(expected)
    inputs = [[token_id] for token_id in range(3 * MAX_AT_ONCE)]
    service = service_of(backend, scheduler={"max_waiting": max_waiting}, adapters={"max_waiting": of_adapter})
    response = send(service, "POST", EMBEDDINGS, json={"model": BASE, "input": inputs})
    assert [item["embedding"] for item in response.json()["data"]] == [vector(token_ids) for token_ids in inputs]
    assert backend.most == expected


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (Incomplete("lost"), 500, "input.1: lost"),
        (InvalidRequest("too long"), 400, "input.1: too long"),
        (AdapterNotFound("no adapter"), 404, "no adapter"),
    ],
)
def test_one_bad_input_fails_the_call_by_name_and_ends_the_others(error: LorayError, status: int, message: str) -> None:
    class OneFails(ScriptedBackend):
        def generate(self, request: GenerationRequest) -> AsyncGenerator[TokenEvent, None]:
            if request.prompt_ids == [5]:
                return ScriptedBackend([[1], error]).generate(request)
            return super().generate(request)

    backend = OneFails([[1]], turn_s=5.0)
    response = post(backend, EMBEDDINGS, {"model": BASE, "input": [[4], [5], [6]]})
    assert (response.status_code, response.json()["error"]["message"]) == (status, message)
    assert backend.endings == ["CancelledError"] * 2
