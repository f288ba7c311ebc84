"""Embeddings in the scheduler, at the native door and in the metrics; their numbers are in tests/models/test_pooling.py."""

import asyncio
from typing import Any

import pytest

from loray.deployments.errors import AdapterFailed, AdapterNotFound, EmbeddingFailed, Incomplete, InvalidRequest, LorayError, Overloaded
from loray.deployments.native import NativeApi
from tests.deployments.scripted_backend import BASE, HF, MAX_TOTAL_TOKENS, ScriptedBackend, post, run, send, service_of
from tests.deployments.simulated_rank import embedding, greedy
from tests.deployments.stepped_scheduler import Server
from tests.deployments.test_metrics import value

EMBEDDINGS = "/v1/embeddings"
vector = ScriptedBackend.embedding_of


def embed(backend: ScriptedBackend, **parameters: Any) -> dict[str, Any]:
    response = post(backend, "/embed", {"inputs": "hello", "parameters": parameters})
    assert response.status_code == 200, response.text
    return response.json()


# In the scheduler.


def test_an_embedding_is_computed_in_chunks_beside_decodes_and_other_adapters() -> None:
    server = Server(max_batch_tokens=8)
    decode = server.add([1], 12, adapter="a")
    server.turn()
    texts = {name: server.embed(list(range(20)), name) for name in ("", "a", "b")}
    server.run()
    assert {name: server.embeddings[text] for name, text in texts.items()} == {name: embedding(name, list(range(20))) for name in texts}
    assert decode.token_ids[1:] == greedy("a", [1], 12)
    pooling_slots = {admission.slot for step in server.rank.steps for admission in step.admissions if admission.pooling}
    assert any({row.slot in pooling_slots for row in step.rows} == {True, False} for step in server.rank.steps)
    server.assert_empty()


def test_an_embedding_computes_all_its_tokens_and_leaves_its_blocks_to_generations() -> None:
    server = Server()
    prompt = list(range(20))
    for _ in range(2):
        text = server.embed(prompt)
        server.run()
        assert server.embeddings[text] == embedding("", prompt) and server.scheduler.num_cached_tokens == 0
    again = server.add(prompt, 4)
    server.run()
    assert again.token_ids[20:] == greedy("", prompt, 4) and server.scheduler.num_cached_tokens == 16


def test_an_embedding_takes_no_row_after_its_last_token() -> None:
    server = Server()
    server.embed([1, 2, 3])
    server.run()
    assert [len(step.rows) for step in server.rank.steps] == [1]


def test_a_preempted_embedding_starts_again_and_is_answered_once() -> None:
    server = Server(num_blocks=8, max_batch_tokens=2)
    old = server.add([1] * 4, 24)
    server.turn()
    text = server.embed([2] * 16)
    server.run()
    assert server.scheduler.num_preemptions > 0
    assert server.embeddings == {text: embedding("", [2] * 16)} and old.token_ids[4:] == greedy("", [1] * 4, 24)
    server.assert_empty()


def test_an_embedding_preempted_while_its_answer_is_on_its_way_is_done() -> None:
    server = Server(num_blocks=4)
    old, text = server.add([1] * 4, 12), server.embed([2] * 4)
    while text.slot is not None or not server.in_flight:
        assert server.plan()
    server.complete()
    assert server.embeddings == {text: embedding("", [2] * 4)} and text.is_finished
    server.run()
    assert len([a for step in server.rank.steps for a in step.admissions if a.pooling]) == 1
    assert old.token_ids[4:] == greedy("", [1] * 4, 12)
    server.assert_empty()


def test_an_aborted_embedding_gives_everything_back_and_no_answer() -> None:
    server = Server(max_batch_tokens=8)
    texts = [server.embed([i] * 6, f"a{i}") for i in range(4)]
    server.plan()
    for text in texts:
        server.scheduler.finish(text)
    server.run()
    assert server.embeddings == {}
    server.assert_empty()


# At the native door.


def test_embed_answers_with_the_vector_and_counts() -> None:
    backend = ScriptedBackend([])
    response = post(backend, "/embed", {"inputs": "hello"})
    (request,) = backend.requests
    assert response.json() == {"embeddings": vector(HF.encode("hello"))}
    assert (request.pooling, request.max_new_tokens, request.adapter_id) == ("mean", 1, "")
    assert response.headers["x-prompt-tokens"] == response.headers["x-total-tokens"] == str(len(HF.encode("hello")))
    times = ("x-validation-time", "x-queue-time", "x-inference-time", "x-total-time", "x-compute-time")
    assert all(response.headers[name].isdigit() for name in times)


def test_the_pooling_is_the_configured_one_and_told_in_info() -> None:
    backend = ScriptedBackend([])
    service = service_of(backend, model={"pooling": "last"})
    send(service, "POST", "/embed", json={"inputs": "hello"})
    assert backend.requests[0].pooling == send(service, "GET", "/info").json()["pooling"] == "last"


def test_embed_takes_loraxs_parameters() -> None:
    backend = ScriptedBackend([])
    embed(backend, adapter_id="pirate", adapter_source="local", api_token="t")
    embed(backend, adapter_id=None, adapter_source=None, api_token=None, merged_adapters=None)
    assert [request.adapter_id for request in backend.requests] == ["pirate", ""]


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"inputs": ""}, "inputs: must have at least one token"),
        ({"inputs": "hello " * 100}, f"more than max_total_tokens, {MAX_TOTAL_TOKENS}"),
        ({"inputs": ["hello"]}, "inputs"),
        ({"inputs": "x", "parameters": {"temperature": 1}}, "temperature: unknown field"),
        ({"inputs": "x", "parameters": {"adapter_source": "ftp"}}, "adapter_source"),
        ({"inputs": "x", "stream": True}, "stream: input should be False"),
        ({}, "inputs: field required"),
    ],
)
def test_embed_refuses_what_it_can_not_do_by_name(body: Any, says: str) -> None:
    backend = ScriptedBackend([])
    response = post(backend, "/embed", body)
    assert (response.status_code, response.json()["error_type"], backend.requests) == (422, "validation", [])
    assert says in response.json()["error"]
    with pytest.raises(InvalidRequest, match="inputs|parameters|adapter|stream"):
        run(NativeApi(service_of(backend)).embed(body))


def test_a_text_may_fill_the_limit() -> None:
    """It needs no room for a token of its own."""
    text = "a" * MAX_TOTAL_TOKENS
    while len(HF.encode(text)) < MAX_TOTAL_TOKENS:
        text += " a"
    assert len(HF.encode(text)) == MAX_TOTAL_TOKENS
    assert post(ScriptedBackend([]), "/embed", {"inputs": text}).status_code == 200


ERRORS: list[tuple[LorayError, int, int, str]] = [  # native status, OpenAI's, error type
    (AdapterNotFound("no adapter 'x'"), 424, 404, "generation"),
    (AdapterFailed("adapter 'x' is for another base"), 424, 424, "generation"),
    (Overloaded("the queue is full"), 429, 429, "overloaded"),
    (InvalidRequest("more than the KV cache holds"), 422, 400, "validation"),
    (Incomplete("lost"), 500, 500, "embedding_failure"),
]


@pytest.mark.parametrize(("error", "native", "compatible", "error_type"), ERRORS)
def test_an_error_has_its_status_in_each_shape(error: LorayError, native: int, compatible: int, error_type: str) -> None:
    response = post(ScriptedBackend([error]), "/embed", {"inputs": "x", "parameters": {"adapter_id": "x"}})
    assert (response.status_code, response.json()["error_type"]) == (native, error_type)
    assert error.message in response.json()["error"]
    response = post(ScriptedBackend([error]), EMBEDDINGS, {"input": "x", "model": "x"})
    assert response.status_code == compatible and error.message in response.json()["error"]["message"]


def test_a_backend_that_falls_silent_is_an_error() -> None:
    response = post(ScriptedBackend([], finish=""), "/embed", {"inputs": "x"})
    assert (response.status_code, response.json()["error_type"]) == (500, "embedding_failure")


def test_the_python_handle_takes_the_same_body_and_raises_what_http_answers() -> None:
    async def twice() -> dict[str, Any]:
        with pytest.raises(EmbeddingFailed):
            await NativeApi(service_of(ScriptedBackend([Incomplete("lost")]))).embed({"inputs": "hello"})
        return await NativeApi(service_of(ScriptedBackend([]))).embed({"inputs": "hello"})

    assert run(twice()) == {"embeddings": vector(HF.encode("hello"))}


def test_cancelling_an_embedding_cancels_the_backend() -> None:
    backend = ScriptedBackend([[1]] * 100, turn_s=0.05)

    async def give_up() -> None:
        call = asyncio.create_task(NativeApi(service_of(backend)).embed({"inputs": "x"}))
        while not backend.requests:
            await asyncio.sleep(0)
        call.cancel()
        await call

    with pytest.raises(asyncio.CancelledError):
        run(give_up())
    assert backend.endings == ["CancelledError"]


# In the metrics.


def test_embeddings_are_counted_by_outcome_apart_from_generations() -> None:
    service = service_of(ScriptedBackend([]))
    for adapter_id in ("pirate", "poet", None):
        send(service, "POST", "/embed", json={"inputs": "hello", "parameters": {"adapter_id": adapter_id}})
    send(service, "POST", EMBEDDINGS, json={"model": BASE, "input": ["hello", "hello"]})
    text = send(service, "GET", "/metrics").text
    assert value(text, 'loray_embeddings_total{adapter="adapter",outcome="success"}') == 2
    assert value(text, 'loray_embeddings_total{adapter="base",outcome="success"}') == 3
    assert value(text, 'loray_prompt_tokens_total{adapter="base"}') == 3 * len(HF.encode("hello"))
    assert value(text, 'loray_embedding_seconds_count{adapter="base"}') == 3
    assert "loray_generations_total{" not in text


def test_a_failed_embedding_is_counted_by_its_error() -> None:
    service = service_of(ScriptedBackend([Incomplete("lost")]))
    send(service, "POST", "/embed", json={"inputs": "hello"})
    text = send(service, "GET", "/metrics").text
    assert value(text, 'loray_embeddings_total{adapter="base",outcome="embedding_failure"}') == 1
    assert "loray_embedding_seconds_count" not in text
