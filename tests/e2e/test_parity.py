"""Tokens over HTTP against transformers and PEFT: many adapters of different ranks and the base in the same steps."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from loray.models.checkpoint import resolve_model
from tests.e2e.conftest import App
from tests.e2e.oracle import Oracle
from tests.models.tiny_llama import save_adapter, save_llama
from tests.tiny_tokenizer import save_tiny_tokenizer, tiny_tokenizer

pytestmark = pytest.mark.slow

RANKS = [4, 8, 12, 16, 24, 32, 48, 64]
NEW_TOKENS = 64
REQUESTS = [(["", *(f"r{rank}" for rank in RANKS)][i % 9], f"Tell me a story about number {i}.") for i in range(16)]


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("smollm2-adapters")
    base = resolve_model("smollm2-135m")
    for rank in RANKS:
        save_adapter(base, root / f"r{rank}", seed=rank, std=0.03, r=rank, lora_alpha=2 * rank)
    return root


@pytest.fixture(scope="module")
def oracle(adapters: Path) -> Oracle:
    return Oracle(resolve_model("smollm2-135m"), {f"r{rank}": adapters / f"r{rank}" for rank in RANKS})


async def generate(client: httpx.AsyncClient, app: App, adapter_id: str, prompt: str) -> list[int]:
    parameters = {"max_new_tokens": NEW_TOKENS, "ignore_eos_token": True, "details": True, "adapter_id": adapter_id}
    response = await client.post(app.url + "/generate", json={"inputs": prompt, "parameters": parameters})
    assert response.status_code == 200, response.text
    return [token["id"] for token in response.json()["details"]["tokens"]]


async def all_at_once(app: App) -> list[list[int]]:
    async with httpx.AsyncClient(timeout=600) as client:
        return await asyncio.gather(*(generate(client, app, *request) for request in REQUESTS))


async def one_by_one(app: App, requests: list[tuple[str, str]]) -> list[list[int]]:
    async with httpx.AsyncClient(timeout=600) as client:
        return [await generate(client, app, *request) for request in requests]


def check(app: App, oracle: Oracle, num_alone: int) -> None:
    together = asyncio.run(all_at_once(app))
    for (adapter_id, prompt), output_ids in zip(REQUESTS, together, strict=True):
        assert len(output_ids) == NEW_TOKENS
        oracle.assert_greedy(adapter_id, oracle.tokenizer(prompt)["input_ids"], output_ids)
    assert len({tuple(output_ids) for output_ids in together}) == len(REQUESTS), "every request has an answer of its own"
    assert asyncio.run(one_by_one(app, REQUESTS[:num_alone])) == together[:num_alone]
    app.wait_until_idle()


@pytest.mark.timeout(900)
def test_greedy_tokens_equal_transformers_and_peft(start_app: Callable[..., Any], adapters: Path, oracle: Oracle) -> None:
    with start_app("parity1", adapters={"local_roots": [adapters]}) as app:
        check(app, oracle, 2)


@pytest.mark.parametrize("tp", [pytest.param(2, marks=pytest.mark.soak), 3])
def test_ranks_with_uneven_shards_equal_transformers_and_peft(start_app: Callable[..., Any], tmp_path: Path, tp: int) -> None:
    """Of a model with SmolLM2's nine heads and three KV heads, but small: the ranks share two cores here."""
    save_tiny_tokenizer(tmp_path / "model")
    sizes = {"hidden_size": 72, "num_attention_heads": 9, "num_key_value_heads": 3, "intermediate_size": 100}
    model = save_llama(tmp_path / "model", vocab_size=len(tiny_tokenizer()), **sizes)
    for rank in RANKS:
        save_adapter(model, tmp_path / "adapters" / f"r{rank}", seed=rank, r=rank, lora_alpha=rank)
    oracle = Oracle(model, {f"r{rank}": tmp_path / "adapters" / f"r{rank}" for rank in RANKS})
    args = {"model": {"id": str(model)}, "adapters": {"local_roots": [tmp_path / "adapters"]}}
    with start_app(f"parity{tp}", tensor_parallel_size=tp, **args) as app:
        check(app, oracle, 4)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("tp", [1, 2, 3])
def test_greedy_tokens_equal_transformers_and_peft_all_alone_too(
    start_app: Callable[..., Any], adapters: Path, oracle: Oracle, tp: int
) -> None:
    with start_app(f"parity-soak{tp}", tensor_parallel_size=tp, adapters={"local_roots": [adapters]}) as app:
        check(app, oracle, len(REQUESTS))
