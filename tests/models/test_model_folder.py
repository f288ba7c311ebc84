"""A folder is a whole checkpoint or is refused in one line that names what is wrong with it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from loray.models.checkpoint import (
    CheckpointError,
    ModelLimits,
    check_folder,
    eos_token_ids,
    max_tensor_parallel,
    model_limits,
    read_config,
    resolve_model,
)
from loray.models.model_folder import weight_files

SHARDS = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A whole checkpoint as far as a look at names can tell."""
    path = tmp_path / "model"
    path.mkdir()
    (path / "config.json").write_text('{"model_type": "llama", "num_attention_heads": 9, "eos_token_id": 2}')
    (path / "tokenizer.json").write_text("{}")
    save_one_tensor(path / "model.safetensors")
    return path


def save_one_tensor(path: Path) -> None:
    save_file({path.name: np.zeros(3, np.float32)}, path)


def refusal_of(folder: Path) -> str:
    with pytest.raises(CheckpointError) as refusal:
        check_folder(folder)
    assert "\n" not in str(refusal.value)
    return str(refusal.value)


def test_a_folder_resolves_to_itself(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve_model(str(folder)) == folder
    monkeypatch.chdir(folder.parent)
    assert resolve_model("./model") == folder


@pytest.mark.parametrize(
    ("removed", "named"), [("config.json", "config.json"), ("tokenizer.json", "tokenizer"), ("model.safetensors", "model.safetensors")]
)
def test_a_folder_that_lacks_a_file_is_refused_by_its_name(folder: Path, removed: str, named: str) -> None:
    (folder / removed).unlink()
    assert f"{folder} lacks" in refusal_of(folder)
    assert named in refusal_of(folder)


def test_a_missing_shard_is_named(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / SHARDS[0])
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": SHARDS[0], "b": SHARDS[1]}}))
    assert refusal_of(folder).endswith(f"lacks {SHARDS[1]}")
    save_one_tensor(folder / SHARDS[1])
    assert check_folder(folder) == folder


@pytest.mark.parametrize("index", [{}, {"weight_map": {}}, {"weight_map": ["a"]}, {"weight_map": {"a": 1}}])
def test_an_index_without_files_is_refused(folder: Path, index: dict[str, Any]) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "model.safetensors.index.json has no weight_map" in refusal_of(folder)


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda path: path.write_bytes(b""), "model.safetensors is empty, cut short"),
        (lambda path: path.write_bytes(b"not safetensors"), "no safetensors file"),
        (lambda path: path.write_bytes(path.read_bytes()[:-1]), "cut short"),
        (lambda path: save_file({}, path), "no tensor in model.safetensors"),
    ],
)
def test_weights_that_hold_nothing_are_refused(folder: Path, spoil: Callable[[Path], None], words: str) -> None:
    spoil(folder / "model.safetensors")
    assert words in refusal_of(folder)


def test_an_empty_shard_among_others_is_named(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / SHARDS[0])
    (folder / SHARDS[1]).write_bytes(b"")
    assert f"{SHARDS[1]} is empty" in refusal_of(folder)


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["model.safetensors", *SHARDS], ["model.safetensors"]),  # as transformers chooses
        (SHARDS, SHARDS),
        (["model.fp16.safetensors", "adapter_model.safetensors"], ["model.fp16.safetensors"]),
        ([*SHARDS, "consolidated.safetensors"], SHARDS),
        (["consolidated.safetensors"], []),
    ],
)
def test_the_files_of_the_weights_are_found_under_any_of_their_names(tmp_path: Path, names: list[str], expected: list[str]) -> None:
    for name in names:
        (tmp_path / name).touch()
    assert weight_files(tmp_path) == expected


@pytest.mark.parametrize("text", ["{", "[1]"])
def test_an_unreadable_config_is_refused(folder: Path, text: str) -> None:
    (folder / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        read_config(folder)


def test_end_tokens_come_from_the_generation_config_first(folder: Path) -> None:
    assert eos_token_ids(folder) == {2}
    (folder / "generation_config.json").write_text('{"eos_token_id": [2, 0]}')
    assert eos_token_ids(folder) == {0, 2}
    (folder / "generation_config.json").write_text('{"bos_token_id": 1}')
    assert eos_token_ids(folder) == {2}


def test_every_rank_needs_an_attention_head() -> None:
    assert max_tensor_parallel({"num_attention_heads": 9}) == 9
    assert max_tensor_parallel({"n_head": 12}) == 12
    with pytest.raises(CheckpointError, match="attention heads"):
        max_tensor_parallel({})


@pytest.mark.parametrize(
    ("settings", "positions"),
    [
        ({"model_type": "llama", "hidden_size": 48, "num_attention_heads": 6, "max_position_embeddings": 64}, 64),
        ({"model_type": "gpt2", "n_head": 6, "n_positions": 64}, 64),
        ({"model_type": "gptj", "n_head": 6, "n_positions": 64}, 64),
        ({"model_type": "gpt_bigcode", "n_head": 6, "n_positions": 64}, 64),
        ({"model_type": "gpt_neo", "num_heads": 6, "max_position_embeddings": 64}, 64),
        ({"model_type": "mpt", "n_heads": 6, "max_seq_len": 64}, 64),
        ({"model_type": "bloom", "n_head": 6}, None),
    ],
)
def test_a_models_limits_are_read_in_its_own_words(tmp_path: Path, settings: dict[str, Any], positions: int | None) -> None:
    from transformers import AutoConfig

    AutoConfig.for_model(**settings, vocab_size=101).save_pretrained(tmp_path)
    assert model_limits(read_config(tmp_path)) == ModelLimits(6, 101, positions)


@pytest.mark.parametrize("config", [{"vocab_size": 8}, {"num_attention_heads": 8}, {"vocab_size": "8", "num_attention_heads": 8}])
def test_a_config_without_heads_or_vocabulary_is_refused(config: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json does not say"):
        model_limits(config)
