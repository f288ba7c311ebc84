"""HTTP and Python handles against a running application: real sockets, real clients, real ranks."""

import contextlib
import json
import re
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from ray import serve

from loray.deployments.config import BLOCK_SIZE
from loray.deployments.errors import AdapterNotFound, InvalidRequest
from tests.e2e.conftest import App
from tests.e2e.oracle import Oracle
from tests.e2e.patience import PATIENCE_S
from tests.models import embedding_oracle

pytestmark = pytest.mark.slow

PROMPT = "hello world, this is"


@pytest.fixture(scope="module")
def root(tiny_adapters: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root of this module's own: tests add and break adapters in it."""
    return Path(shutil.copytree(tiny_adapters, tmp_path_factory.mktemp("doors") / "adapters"))


@pytest.fixture(scope="module")
def app(start_app: Callable[..., Any], tiny_model: Path, root: Path) -> Iterator[App]:
    with start_app("loray", model={"id": str(tiny_model)}, adapters={"local_roots": [root]}) as app:
        yield app


@pytest.fixture(scope="module")
def oracle(tiny_model: Path, root: Path) -> Oracle:
    return Oracle(tiny_model, {"a4": root / "a4", "a8": root / "a8"})


def body(adapter_id: str = "", max_new_tokens: int = 12, **parameters: Any) -> dict[str, Any]:
    parameters = {"adapter_id": adapter_id, "max_new_tokens": max_new_tokens, "ignore_eos_token": True, **parameters}
    return {"inputs": PROMPT, "parameters": parameters}


def token_ids(response: httpx.Response) -> list[int]:
    assert response.status_code == 200, response.text
    return [token["id"] for token in response.json()["details"]["tokens"]]


@pytest.mark.parametrize("adapter_id", ["", "a4", "a8"])
def test_generate_gives_the_greedy_tokens_of_base_and_adapters(app: App, oracle: Oracle, adapter_id: str) -> None:
    output_ids = token_ids(app.post("/generate", body(adapter_id, details=True)))
    oracle.assert_greedy(adapter_id, oracle.tokenizer(PROMPT)["input_ids"], output_ids)


def test_a_stream_has_one_event_a_token_and_ends_with_the_whole_text(app: App) -> None:
    whole = app.post("/generate", body(details=True)).json()
    response = app.post("/generate_stream", body())
    events = [json.loads(line.removeprefix("data:")) for line in response.text.splitlines() if line]
    assert [event["token"]["id"] for event in events] == [token["id"] for token in whole["details"]["tokens"]]
    assert events[-1]["generated_text"] == whole["generated_text"] and "[DONE]" not in response.text


def test_the_same_seed_gives_the_same_tokens_and_another_seed_others(app: App) -> None:
    first, again, other = (token_ids(app.post("/generate", body(details=True, temperature=1.5, seed=seed))) for seed in (1, 1, 2))
    assert first == again != other


def test_openais_client_chats_and_streams(app: App) -> None:
    client = openai.OpenAI(base_url=app.url + "/v1", api_key="unused", max_retries=0)
    messages: Any = [{"role": "user", "content": "hello"}]
    whole = client.chat.completions.create(model="a4", messages=messages, max_tokens=8, temperature=0)
    chunks = client.chat.completions.create(model="a4", messages=messages, max_tokens=8, temperature=0, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.choices[0].message.content
    assert {model.id for model in client.models.list()} >= {"a4", "a8", "a20", "a64"}
    with pytest.raises(openai.NotFoundError, match="nobody"):
        client.chat.completions.create(model="nobody", messages=messages)


def test_the_python_handle_takes_the_same_body(app: App) -> None:
    handle = serve.get_app_handle("loray")
    assert handle.generate.remote(body("a8")).result() == app.post("/generate", body("a8")).json()
    events = list(handle.options(stream=True).generate_stream.remote(body("a8")))
    assert events[-1]["generated_text"] == app.post("/generate", body("a8")).json()["generated_text"]


def test_the_python_handle_raises_what_http_answers(app: App) -> None:
    handle = serve.get_app_handle("loray")
    with pytest.raises(InvalidRequest, match="max_new_tokens"):
        handle.generate.remote(body(max_new_tokens=0)).result()
    with pytest.raises(AdapterNotFound, match="nobody"):
        handle.generate.remote(body("nobody")).result()


@pytest.mark.parametrize("adapter_id", ["", "a8"])
def test_embed_gives_the_mean_of_the_last_hidden_states(app: App, oracle: Oracle, tiny_model: Path, root: Path, adapter_id: str) -> None:
    embedding = app.post("/embed", {"inputs": PROMPT, "parameters": {"adapter_id": adapter_id}}).json()["embeddings"]
    model = embedding_oracle.oracle(tiny_model, root / adapter_id if adapter_id else None)
    prompt_ids = oracle.tokenizer(PROMPT)["input_ids"]
    assert embedding == pytest.approx(embedding_oracle.oracle_embedding(model, prompt_ids, "mean"), abs=1e-4)
    handle = serve.get_app_handle("loray")
    assert handle.embed.remote({"inputs": PROMPT, "parameters": {"adapter_id": adapter_id}}).result() == {"embeddings": embedding}


def test_openais_client_embeds_many_texts_while_others_are_generated(app: App) -> None:
    client = openai.OpenAI(base_url=app.url + "/v1", api_key="unused", max_retries=0)
    texts = [f"text number {i}, " * (1 + i % 7) for i in range(100)]
    alone = [app.post("/embed", {"inputs": text, "parameters": {"adapter_id": "a4"}}).json()["embeddings"] for text in texts[:8]]
    with ThreadPoolExecutor(4) as others:
        generations = [others.submit(app.post, "/generate", body("a8", max_new_tokens=100)) for _ in range(4)]
        answer = client.embeddings.create(model="a4", input=texts)
        assert {generation.result().status_code for generation in generations} == {200}
    assert [item.index for item in answer.data] == list(range(100)) and answer.usage.prompt_tokens > 100
    for item, expected in zip(answer.data, alone, strict=False):
        assert item.embedding == pytest.approx(expected, abs=1e-5)
    with pytest.raises(openai.NotFoundError, match="nobody"):
        client.embeddings.create(model="nobody", input="x")
    assert app.wait_until_idle()["embeddings_total"] >= 108


def test_an_unknown_adapter_is_named_in_the_error(app: App) -> None:
    asked = {
        "/generate": body("nobody"),
        "/generate_stream": body("nobody"),
        "/embed": {"inputs": "x", "parameters": {"adapter_id": "nobody"}},
    }
    for path, wanted in asked.items():
        response = app.post(path, wanted)
        assert response.status_code == 424
        assert response.json()["error_type"] == "generation" and "nobody" in response.json()["error"]


def test_an_adapter_dropped_into_the_folder_works_at_once_and_a_replaced_one_counts(app: App, root: Path) -> None:
    shutil.copytree(root / "a4", root / "new")
    assert token_ids(app.post("/generate", body("new", details=True))) == token_ids(app.post("/generate", body("a4", details=True)))
    shutil.rmtree(root / "new")
    shutil.copytree(root / "a8", root / "new")
    assert token_ids(app.post("/generate", body("new", details=True))) == token_ids(app.post("/generate", body("a8", details=True)))


def test_a_broken_adapter_fails_alone_and_says_why(app: App, root: Path) -> None:
    shutil.copytree(root / "a4", root / "broken")
    weights = root / "broken" / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    response = app.post("/generate", body("broken"))
    assert response.status_code == 424 and "broken" in response.json()["error"]
    assert app.post("/generate", body("a4")).status_code == 200
    app.wait_until_idle()


def test_blocks_are_free_again_when_the_client_leaves(app: App) -> None:
    long = body("a4", max_new_tokens=2000)

    def leave_after_the_first_token(_: int) -> None:
        with httpx.stream("POST", app.url + "/generate_stream", json=long, timeout=PATIENCE_S) as response:
            next(response.iter_lines())

    before = app.wait_until_idle()["generated_tokens_total"]
    with ThreadPoolExecutor(8) as clients:
        list(clients.map(leave_after_the_first_token, range(8)))
    after = app.wait_until_idle()["generated_tokens_total"]
    assert 8 <= after - before < 8 * 2000, "nobody computes to the end for a client that has left"
    with pytest.raises(httpx.TimeoutException):
        httpx.post(app.url + "/generate", json=long, timeout=0.1)
    app.wait_until_idle()
    assert re.search(r"^loray_driver_kv_blocks_used\{replica=\"\w+\"\} 0\.0$", app.get("/metrics").text, re.MULTILINE)


@pytest.mark.parametrize("is_streamed", [True, False])
def test_blocks_are_free_again_when_a_handles_call_is_cancelled(app: App, is_streamed: bool) -> None:
    handle, long = serve.get_app_handle("loray"), body("a8", max_new_tokens=1500, ignore_eos_token=True)
    before = app.wait_until_idle()["generated_tokens_total"]
    call = handle.options(stream=True).generate_stream.remote(long) if is_streamed else handle.generate.remote(long)
    app.wait_until(lambda stats: stats["running"] == 1 and stats["generated_tokens_total"] > before)
    call.cancel()
    assert app.wait_until_idle()["generated_tokens_total"] - before < 1500


def test_whoever_leaves_before_anything_came_has_nothing_computed_to_the_end(app: App) -> None:
    """At any moment on the way to the engine: Serve cancels what it has begun of a request, piece by piece."""
    num_clients, num_new = 60, 1500
    long = body("a4", max_new_tokens=num_new)

    def leave_early(number: int) -> None:
        with contextlib.suppress(httpx.TimeoutException):
            httpx.post(app.url + "/generate", json=long, timeout=0.1 * number / num_clients + 0.002)

    before = app.wait_until_idle()["generated_tokens_total"]
    with ThreadPoolExecutor(8) as clients:
        list(clients.map(leave_early, range(num_clients)))
    after = app.wait_until_idle()["generated_tokens_total"]
    assert after - before < num_new, "not one of them ran to its end"


def test_a_stop_string_ends_the_request_in_the_engine_too(app: App) -> None:
    text = app.post("/generate", body(max_new_tokens=40)).json()["generated_text"]
    stop = text[5:8]
    before = app.wait_until_idle()["generated_tokens_total"]
    stopped = app.post("/generate", body(max_new_tokens=2000, stop=[stop], details=True)).json()
    assert stopped["generated_text"] == text[: text.index(stop) + len(stop)]
    assert stopped["details"]["finish_reason"] == "stop_sequence"
    assert app.wait_until_idle()["generated_tokens_total"] - before < 2000


def test_health_info_and_metrics_answer(app: App) -> None:
    for path in ("/", "/health", "/ping", "/startup"):
        assert app.get(path).status_code == 200
    info = app.get("/info").json()
    assert info["max_total_tokens"] == 2048 and info["model_dtype"] == "float32" and info["attention"]
    assert info["max_batch_total_tokens"] == info["kv_blocks"] * BLOCK_SIZE
    assert re.search(r"^loray_driver_kv_blocks\{replica=\"\w+\"\} \d", app.get("/metrics").text, re.MULTILINE)


def test_an_answer_of_many_megabytes_comes_whole(app: App, tiny_model: Path) -> None:
    """Serve's way to its replicas has limits of its own."""
    num_tokens, num_choices = 600, 6
    wanted = {"max_tokens": num_tokens, "ignore_eos": True, "n": num_choices, "logprobs": True, "top_logprobs": 20}
    messages = [{"role": "user", "content": PROMPT}]
    response = app.post("/v1/chat/completions", {"model": str(tiny_model), "messages": messages, "temperature": 1, **wanted})
    assert response.status_code == 200, response.text[:500]
    assert len(response.content) > 4 << 20
    assert response.json()["usage"]["completion_tokens"] == num_tokens * num_choices
