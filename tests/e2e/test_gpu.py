"""The whole stack with its rank on a GPU, against transformers and PEFT in float32 on the CPU."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from tests.e2e.oracle import Oracle
from tests.e2e.patience import PATIENCE_S

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")]

NAMES = ["", "a4", "a8", "a20", "a64"]


async def generate(url: str) -> list[list[int]]:
    async def one(client: httpx.AsyncClient, i: int) -> list[int]:
        parameters = {"adapter_id": NAMES[i % 5], "max_new_tokens": 48, "ignore_eos_token": True, "details": True}
        response = await client.post(url + "/generate", json={"inputs": f"request {i}", "parameters": parameters})
        assert response.status_code == 200, response.text
        return [token["id"] for token in response.json()["details"]["tokens"]]

    async with httpx.AsyncClient(timeout=PATIENCE_S) as client:
        return await asyncio.gather(*(one(client, i) for i in range(16)))


def test_mixed_adapters_on_a_gpu_give_the_greedy_tokens(start_app: Callable[..., Any], tiny_model: Path, tiny_adapters: Path) -> None:
    model = {"id": str(tiny_model), "dtype": "float32"}
    with start_app("gpu", device="cuda", model=model, adapters={"local_roots": [tiny_adapters]}) as app:
        outputs = asyncio.run(generate(app.url))
        assert app.get("/info").json()["model_device_type"] == "cuda"
        app.wait_until_idle()
    oracle = Oracle(tiny_model, {name: tiny_adapters / name for name in NAMES[1:]})
    for i, output_ids in enumerate(outputs):
        oracle.assert_greedy(NAMES[i % 5], oracle.tokenizer(f"request {i}")["input_ids"], output_ids)
