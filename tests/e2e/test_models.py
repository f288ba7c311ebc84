"""Other architectures than Llama over Ray and HTTP: natively on several ranks, and through transformers."""

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from transformers import BloomConfig, PretrainedConfig

from tests.e2e.conftest import App
from tests.e2e.oracle import Oracle
from tests.e2e.patience import PATIENCE_S
from tests.models.families import FAMILIES, Adapter, config_of, random_model, save_adapter
from tests.tiny_tokenizer import save_tiny_tokenizer, tiny_tokenizer

pytestmark = pytest.mark.slow

ADAPTERS = {"small": Adapter(4), "large": Adapter(20, uses_rslora=True)}
PROMPTS = ["hello", "this is a test of the tiny tokenizer", "grüße, user and system", "日本語 🙂", "world world world"]


def bloom(vocab_size: int) -> PretrainedConfig:
    return BloomConfig(vocab_size=vocab_size, hidden_size=40, n_layer=2, n_head=5, initializer_range=0.15)


SERVED = {  # architecture -> its config, and the ranks that serve it
    "gpt2": (lambda size: config_of(FAMILIES["gpt2"], vocab_size=size), 2),
    "bloom": (bloom, 1),
}


@pytest.fixture(scope="module", params=SERVED)
def served(
    request: pytest.FixtureRequest, start_app: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[App, Oracle]]:
    make_config, ranks = SERVED[request.param]
    root = tmp_path_factory.mktemp(request.param)
    model = root / "model"
    random_model(make_config(len(tiny_tokenizer()))).save_pretrained(model)
    save_tiny_tokenizer(model)
    folders = {name: save_adapter(model, root / "adapters" / name, adapter) for name, adapter in ADAPTERS.items()}
    other = root / "other"
    random_model(config_of(FAMILIES["gpt2"], n_embd=20, vocab_size=len(tiny_tokenizer()))).save_pretrained(other)
    save_adapter(other, root / "adapters" / "foreign", Adapter(4))
    args = {"model": {"id": str(model)}, "tensor_parallel_size": ranks, "adapters": {"local_roots": [root / "adapters"]}}
    with start_app(request.param, **args) as app:
        yield app, Oracle(model, folders)


async def generate(client: httpx.AsyncClient, app: App, adapter_id: str, prompt: str) -> list[int]:
    parameters = {"max_new_tokens": 24, "ignore_eos_token": True, "details": True, "adapter_id": adapter_id}
    response = await client.post(app.url + "/generate", json={"inputs": prompt, "parameters": parameters})
    assert response.status_code == 200, response.text
    return [token["id"] for token in response.json()["details"]["tokens"]]


async def ask_all(app: App, requests: list[tuple[str, str]]) -> list[list[int]]:
    async with httpx.AsyncClient(timeout=PATIENCE_S) as client:
        return await asyncio.gather(*(generate(client, app, *request) for request in requests))


def test_the_base_and_adapters_together_equal_transformers_and_peft(served: tuple[App, Oracle]) -> None:
    app, oracle = served
    requests = [(adapter_id, prompt) for adapter_id in ("", *ADAPTERS) for prompt in PROMPTS]
    for (adapter_id, prompt), output_ids in zip(requests, asyncio.run(ask_all(app, requests)), strict=True):
        assert len(output_ids) == 24
        oracle.assert_greedy(adapter_id, oracle.tokenizer(prompt)["input_ids"], output_ids)
    app.wait_until_idle()


def test_an_adapter_of_another_model_is_refused_by_tensor_and_shapes_and_others_go_on(served: tuple[App, Oracle]) -> None:
    app, oracle = served

    async def ask() -> tuple[list[int], httpx.Response]:
        async with httpx.AsyncClient(timeout=PATIENCE_S) as client:
            body = {"inputs": "hello", "parameters": {"adapter_id": "foreign"}}
            return await asyncio.gather(generate(client, app, "small", "hello"), client.post(app.url + "/generate", json=body))

    output_ids, refusal = asyncio.run(ask())
    oracle.assert_greedy("small", oracle.tokenizer("hello")["input_ids"], output_ids)
    assert 400 <= refusal.status_code < 500
    assert "foreign" in refusal.text and "lora_" in refusal.text
    if app.name == "gpt2":  # the same modules, half as wide
        assert "(4, 20)" in refusal.text and "(4, 40)" in refusal.text
    app.wait_until_idle()
