"""Two hundred requests of all sizes at random times, some cut by the client, against a KV pool too small for them."""

import asyncio
import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from loray.models.checkpoint import resolve_model
from tests.e2e.conftest import App
from tests.e2e.oracle import Oracle

pytestmark = pytest.mark.slow

LETTERS = "abcdefghijklmnopqrstuvwxyz "


@dataclass
class Case:
    prompt: str
    num_prompt: int  # tokens kept of the prompt
    max_new_tokens: int
    adapter_id: str
    delay: float
    is_streamed: bool
    is_cut: bool

    @property
    def body(self) -> dict[str, Any]:
        parameters = {"max_new_tokens": self.max_new_tokens, "truncate": self.num_prompt, "adapter_id": self.adapter_id, "details": True}
        return {"inputs": self.prompt, "parameters": parameters}


def cases(count: int, adapter_ids: list[str], seconds: float) -> list[Case]:
    rng = random.Random(0)

    def case(i: int) -> Case:
        num_prompt = min(int(rng.paretovariate(0.5)), 1500) if i % 3 else rng.randint(1, 1500)
        prompt = "".join(rng.choices(LETTERS, k=8 * num_prompt))
        return Case(
            prompt, num_prompt, rng.randint(1, 200), rng.choice(["", *adapter_ids]), rng.uniform(0, seconds), i % 2 == 0, i % 10 == 0
        )

    return [case(i) for i in range(count)]


async def send(client: httpx.AsyncClient, app: App, case: Case) -> list[int] | None:
    """The tokens that came back, all of them or those before the cut; None for a cut request that is not streamed."""
    await asyncio.sleep(case.delay)
    if case.is_streamed:
        return await read_stream(client, app, case)
    try:
        timeout = 0.2 if case.is_cut else 3600  # all of them take two slow cores more than ten minutes
        response = await client.post(app.url + "/generate", json=case.body, timeout=timeout)
    except httpx.TimeoutException:
        assert case.is_cut
        return None
    assert response.status_code == 200, response.text
    return [token["id"] for token in response.json()["details"]["tokens"]]


async def read_stream(client: httpx.AsyncClient, app: App, case: Case) -> list[int]:
    token_ids = []
    async with client.stream("POST", app.url + "/generate_stream", json=case.body) as response:
        assert response.status_code == 200, await response.aread()
        async for line in response.aiter_lines():
            if line.startswith("data:"):
                event = json.loads(line.removeprefix("data:"))
                token_ids.append(event["token"]["id"])
                if case.is_cut and len(token_ids) > case.max_new_tokens // 2:
                    return token_ids
    assert event["generated_text"] is not None and event["details"]["generated_tokens"] == len(token_ids)
    return token_ids


async def flood(app: App, requests: list[Case]) -> list[list[int] | None]:
    async with httpx.AsyncClient(timeout=3600, limits=httpx.Limits(max_connections=None)) as client:
        return await asyncio.gather(*(send(client, app, case) for case in requests))


def check(app: App, oracle: Oracle, requests: list[Case]) -> None:
    outputs = asyncio.run(flood(app, requests))
    eos_id = oracle.tokenizer.eos_token_id
    for case, output_ids in zip(requests, outputs, strict=True):
        if output_ids:
            prompt_ids = oracle.tokenizer(case.prompt)["input_ids"][-case.num_prompt :]
            assert len(prompt_ids) == case.num_prompt
            oracle.assert_greedy(case.adapter_id, prompt_ids, output_ids)
            assert case.is_cut or len(output_ids) == case.max_new_tokens or output_ids[-1] == eos_id
    stats = app.wait_until_idle()
    assert stats["preemptions_total"] > 0, "the pool was large enough after all"


def test_every_request_of_a_flood_ends_with_the_right_tokens(start_app: Callable[..., Any], tiny_model: Path, tiny_adapters: Path) -> None:
    names = ["a4", "a8", "a20", "a64"]
    args = {
        "model": {"id": str(tiny_model)},
        "kv_cache": {"cpu_bytes": 150 * 16_384},  # a block of this model is 16 KiB
        "scheduler": {"max_batch_tokens": 512, "max_running": 64},
        "adapters": {"local_roots": [tiny_adapters]},
    }
    with start_app("flood", **args) as app:
        check(app, Oracle(tiny_model, {name: tiny_adapters / name for name in names}), cases(200, names, seconds=2))


@pytest.mark.soak
def test_every_request_of_a_flood_ends_with_the_right_tokens_on_smollm2(start_app: Callable[..., Any]) -> None:
    examples = Path(__file__).parents[2] / "examples" / "adapters"
    names = sorted(folder.name for folder in examples.iterdir())
    args = {"kv_cache": {"cpu_bytes": 150 * 737_280}, "scheduler": {"max_batch_tokens": 512}, "adapters": {"local_roots": [examples]}}
    with start_app("flood-soak", **args) as app:
        oracle = Oracle(resolve_model("smollm2-135m"), {name: examples / name for name in names})
        check(app, oracle, cases(200, names, seconds=120))
