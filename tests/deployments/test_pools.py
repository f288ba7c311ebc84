"""How large the ranks' pools are, and what a driver says of them: over a real engine and a simulated rank, up to the HTTP answer."""

import json
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from loray.deployments.config import BLOCK_SIZE, ServerArgs
from loray.deployments.driver import driver_info, rank_spec, start_engine
from loray.deployments.engine import Engine
from loray.deployments.pools import size_pools
from loray.deployments.service import Service
from loray.deployments.tokenizer import Tokenizer
from loray.models.step import LoadReport
from tests.deployments.local_driver import LocalBackend, driver_over
from tests.deployments.rank_in_process import RankInProcess
from tests.deployments.scripted_backend import HF, send
from tests.deployments.simulated_rank import SimulatedRank
from tests.tiny_tokenizer import tiny_tokenizer

BLOCK_BYTES = 1000
NUM_BLOCKS, MODEL_TOKENS = 3, 2048
COMMIT = "0123456789abcdef0123456789abcdef01234567"


def report(**fields: Any) -> LoadReport:
    facts = {"device": "cpu", "dtype": "float32", "attention": "simulated", "weight_bytes": 0, "load_seconds": 0.0, "free_bytes": 0}
    return LoadReport(**{**facts, "block_bytes": BLOCK_BYTES, "page_bytes": 0, "has_blocks": True, "lora_shapes": {}, **fields})


def model_folder(folder: Path) -> Path:
    folder.mkdir(parents=True)
    config = {"architectures": ["LlamaForCausalLM"], "num_attention_heads": 2, "vocab_size": 320, "max_position_embeddings": MODEL_TOKENS}
    (folder / "config.json").write_text(json.dumps(config))
    tiny_tokenizer().backend_tokenizer.save(str(folder / "tokenizer.json"))
    save_file({"weight": torch.zeros(1)}, folder / "model.safetensors")
    return folder


def args_for(folder: Path, num_blocks: int = NUM_BLOCKS, **model: Any) -> ServerArgs:
    tree = {"model": {"id": str(folder), **model}, "device": "cpu", "kv_cache": {"cpu_bytes": num_blocks * BLOCK_BYTES}}
    return ServerArgs.model_validate(tree)


def info_of(args: ServerArgs, folder: Path) -> tuple[dict[str, Any], Engine]:
    """What a driver with such a cache says, and its engine, which runs."""
    steps = RankInProcess()

    def allocate(num_blocks: int, num_pages: int) -> int:
        steps.rank = SimulatedRank(num_blocks, BLOCK_SIZE, num_pages)
        return num_blocks

    group: Any = SimpleNamespace(start=allocate, steps=steps, host_reports=SimpleNamespace(start=lambda on_prepared: None))
    engine = start_engine(args, group, [report()], (), on_failure=lambda reason: pytest.fail(reason))
    return driver_info(args, rank_spec(args, folder), report(), engine.stats()), engine


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return model_folder(tmp_path / "model")


def test_a_request_that_names_no_length_gets_what_a_small_cache_holds(folder: Path) -> None:
    args = args_for(folder)
    info, engine = info_of(args, folder)
    backend: Any = LocalBackend(lambda: driver_over(engine))
    service = Service(args, Tokenizer(HF), backend, info["max_total_tokens"], info)
    answer = send(service, "POST", "/generate", json={"inputs": "hello", "parameters": {"details": True}})
    assert answer.status_code == 200, answer.text
    details = answer.json()["details"]
    assert details["prompt_tokens"] + details["generated_tokens"] == NUM_BLOCKS * BLOCK_SIZE
    too_long = send(service, "POST", "/generate", json={"inputs": "hello", "parameters": {"max_new_tokens": NUM_BLOCKS * BLOCK_SIZE}})
    assert too_long.status_code == 422 and "more than max_total_tokens, 48" in too_long.json()["error"]
    assert send(service, "GET", "/info").json()["max_input_length"] == NUM_BLOCKS * BLOCK_SIZE - 1


def test_the_log_tells_of_a_cache_that_holds_less_than_a_request_may_have(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "ray.serve.loray"):
        info, _ = info_of(args_for(folder, MODEL_TOKENS // BLOCK_SIZE), folder)
        assert info["max_total_tokens"] == MODEL_TOKENS and not caplog.records
        info_of(args_for(folder), folder)
    (warning,) = [record.getMessage() for record in caplog.records]
    assert "48 tokens" in warning and "max_total_tokens, 2048" in warning and warning.endswith("raise kv_cache.cpu_bytes")


def test_the_tokens_of_a_batch_are_those_of_the_cache(folder: Path) -> None:
    assert info_of(args_for(folder, 200), folder)[0]["max_batch_total_tokens"] == 200 * BLOCK_SIZE


@pytest.mark.parametrize(
    ("path", "expected"),
    [(f"models--org--name/snapshots/{COMMIT}", COMMIT), (f"mine/{COMMIT}", "v1"), ("snapshots/monday", "v1")],
)
def test_the_models_version_is_the_commit_that_the_hub_resolved_else_the_revision_asked_for(
    tmp_path: Path, path: str, expected: str
) -> None:
    folder = model_folder(tmp_path / path)
    assert info_of(args_for(folder, revision="v1"), folder)[0]["model_sha"] == expected


def test_the_rank_with_the_least_room_sizes_the_pools(folder: Path) -> None:
    args = args_for(folder)
    assert size_pools(args, [report(), report(block_bytes=BLOCK_BYTES * 3)]) == (1, 0)
    with pytest.raises(ValueError, match=r"no room for a single KV block .* raise kv_cache\.cpu_bytes"):
        size_pools(args, [report(), report(block_bytes=BLOCK_BYTES * 4)])
