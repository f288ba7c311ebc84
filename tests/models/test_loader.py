"""The loader reads what the model needs, no more and no less, and says what does not fit."""

import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

from loray.models import progress
from loray.models.loader import WeightsError
from tests.models.conductor import Conductor, prompt_of
from tests.models.tiny_llama import oracle, oracle_generate, save_llama

Tensors = dict[str, torch.Tensor]


def rewrite(folder: Path, edit: Callable[[Tensors], Tensors]) -> None:
    file = folder / "model.safetensors"
    save_file(edit(load_file(file)), file)


def test_a_checkpoint_in_several_files_is_read(base: Path, tmp_path: Path) -> None:
    LlamaForCausalLM.from_pretrained(base).save_pretrained(tmp_path, max_shard_size="40KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    assert Conductor(tmp_path).generate(prompt_of(9)) == Conductor(base).generate(prompt_of(9))


def test_names_without_the_model_prefix_are_read(tmp_path: Path) -> None:
    folder = save_llama(tmp_path)
    expected = oracle_generate(oracle(folder), prompt_of(9))[0]
    rewrite(folder, lambda tensors: {name.removeprefix("model."): tensor for name, tensor in tensors.items()})
    assert Conductor(folder).generate(prompt_of(9)).token_ids == expected


def test_a_copy_of_the_tied_head_and_rotary_buffers_may_be_in_the_checkpoint(tmp_path: Path) -> None:
    folder = save_llama(tmp_path, tie_word_embeddings=True)
    expected = oracle_generate(oracle(folder), prompt_of(9))[0]
    buffer = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4)}
    rewrite(folder, lambda tensors: tensors | buffer | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()})
    conductor = Conductor(folder)
    assert conductor.generate(prompt_of(9)).token_ids == expected
    assert conductor.runner._model.lm_head.is_tied


def test_a_head_of_its_own_wins_over_a_config_that_says_tied(tmp_path: Path) -> None:
    folder = save_llama(tmp_path, tie_word_embeddings=True)
    tied = oracle_generate(oracle(folder), prompt_of(9))[0]
    rewrite(folder, lambda tensors: tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].flip(0).contiguous()})
    expected = oracle_generate(oracle(folder), prompt_of(9))[0]
    assert expected != tied
    assert Conductor(folder).generate(prompt_of(9)).token_ids == expected


@pytest.mark.parametrize("dtype", [torch.int8, torch.int64, torch.float8_e4m3fn])
def test_weights_that_are_no_plain_numbers_are_refused_by_name_and_dtype(tmp_path: Path, dtype: torch.dtype) -> None:
    folder = save_llama(tmp_path)
    name = "model.layers.1.mlp.up_proj.weight"
    rewrite(folder, lambda tensors: tensors | {name: tensors[name].to(dtype)})
    with pytest.raises(WeightsError, match=f"{name} has dtype"):
        Conductor(folder)


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda t: {k: v for k, v in t.items() if k != "model.norm.weight"}, ["missing model.norm.weight"]),
        (lambda t: t | {"model.layers.7.x": torch.zeros(1)}, ["unexpected model.layers.7.x"]),
        (lambda t: t | {"lm_head.weight": torch.zeros(99, 48)}, ["lm_head.weight", "(99, 48)", "(101, 48)"]),
    ],
)
def test_what_does_not_fit_is_named(tmp_path: Path, edit: Callable[[Tensors], Tensors], words: list[str]) -> None:
    folder = save_llama(tmp_path)
    rewrite(folder, edit)
    with pytest.raises(WeightsError) as caught:
        Conductor(folder)
    for word in words:
        assert word in str(caught.value)


def test_a_broken_or_absent_file_is_named(tmp_path: Path) -> None:
    folder = save_llama(tmp_path)
    (folder / "model.safetensors").write_bytes(b"no tensors")
    with pytest.raises(WeightsError, match=r"model\.safetensors"):
        Conductor(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(WeightsError, match=r"model\.safetensors"):
        Conductor(folder)


def test_of_many_names_that_do_not_fit_the_first_are_named_and_the_rest_counted(tmp_path: Path) -> None:
    folder = save_llama(tmp_path)
    rewrite(folder, lambda tensors: {f"other.{name}": tensor for name, tensor in tensors.items()})
    num_tensors = len(load_file(folder / "model.safetensors"))
    with pytest.raises(WeightsError) as caught:
        Conductor(folder)
    missing, unexpected = str(caught.value).split("; ")
    assert missing.endswith(f" and {num_tensors - 8} more")
    assert unexpected.endswith(f" and {num_tensors - 8} more")
    assert unexpected.count("other.") == 8


@pytest.mark.parametrize(("seconds", "has_lines"), [(0.0, True), (60.0, False)])
def test_a_long_load_without_a_terminal_reports_in_the_log(
    base: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, seconds: float, has_lines: bool
) -> None:
    monkeypatch.setattr(progress, "REPORT_S", seconds)
    with caplog.at_level(logging.INFO, "loray.progress"):
        Conductor(base)
    assert ("loading weights: 3 of 15 layers" in caplog.text) == has_lines


def test_loading_logs_bytes_and_seconds(base: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "loray.loader"):
        Conductor(base)
    assert "tensors" in caplog.text and " GB" in caplog.text and " s" in caplog.text


def test_the_report_counts_the_weights_as_they_are_kept(tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 128}
    folder = save_llama(tmp_path, **sizes)
    shapes = {name: tensor.shape for name, tensor in load_file(folder / "model.safetensors").items()}
    in_bfloat16 = 2 * sum(shape.numel() for shape in shapes.values())
    assert Conductor(folder, dtype=torch.bfloat16).report.weight_bytes == in_bfloat16
    linears = [shape for name, shape in shapes.items() if len(shape) == 2 and "embed" not in name]
    saved = sum(shape.numel() - 4 * shape[0] for shape in linears)  # a byte an element, less a scale for each output
    assert Conductor(folder, dtype=torch.bfloat16, has_float8_weights=True).report.weight_bytes == in_bfloat16 - saved
