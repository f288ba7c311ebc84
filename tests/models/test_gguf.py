"""A GGUF file is a model id: converted once, in a process of its own, with the numbers and the tokenizer that it holds."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from loray.models import converted
from loray.models.checkpoint import CheckpointError, eos_token_ids, read_config, resolve_model
from loray.models.checkpoint import _fingerprint as fingerprint
from tests.models.conductor import Conductor
from tests.models.tiny_gguf import Arrays, tiny_gguf
from tests.models.tiny_llama import oracle_generate

Q4_1, Q8_0, BF16 = GGMLQuantizationType.Q4_1, GGMLQuantizationType.Q8_0, GGMLQuantizationType.BF16
PROMPT = [7, 100, 33, 60, 9, 9, 250]

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("quick_conversions")]  # one process imports transformers for all


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "loray" / "models"


def folders_in(cache: Path) -> list[str]:
    return sorted(path.name for path in cache.iterdir() if path.suffix != ".lock") if cache.is_dir() else []


def without_up_proj(arrays: Arrays) -> Arrays:
    return {name: values for name, values in arrays.items() if name != "blk.1.ffn_up.weight"}


def dequantised(gguf: Path) -> torch.nn.Module:
    model: torch.nn.Module = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    return model


def test_a_file_is_converted_once_and_a_changed_one_anew(tmp_path: Path, cache: Path, capfd: pytest.CaptureFixture[str]) -> None:
    gguf = tiny_gguf(tmp_path / "tiny.Q8_0.gguf", Q8_0)
    folder = resolve_model(str(gguf), verify=True)
    assert folder.parent == cache
    assert folder.name.startswith("tiny.Q8_0-")
    assert "converting tiny.Q8_0.gguf" in capfd.readouterr().err

    assert resolve_model(str(gguf), verify=True) == folder
    assert capfd.readouterr().err == ""

    (folder / "model.safetensors").write_bytes(b"broken")
    assert resolve_model(str(gguf)) == folder
    assert "is broken" in capfd.readouterr().err

    content = bytearray(gguf.read_bytes())
    content[-5] ^= 1
    gguf.write_bytes(content)
    assert resolve_model(str(gguf)) != folder
    assert len(folders_in(cache)) == 2


def test_files_that_differ_in_nothing_but_their_ends_are_told_apart(tmp_path: Path) -> None:
    first, second = (tiny_gguf(tmp_path / f"{seed}.gguf", seed=seed) for seed in range(2))
    for file in (first, second):
        os.utime(file, ns=(0, 0))
    assert first.stat().st_size == second.stat().st_size
    assert fingerprint("", first) != fingerprint("", second)


def test_a_file_is_found_from_the_current_folder_and_read_where_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers would rather take a file of the same name that lies in the current folder."""
    (tmp_path / "there").mkdir()
    tiny_gguf(tmp_path / "there" / "tiny.gguf", seed=1)
    tiny_gguf(tmp_path / "tiny.gguf", seed=2)
    monkeypatch.chdir(tmp_path)
    embedding = "model.embed_tokens.weight"
    found = load_file(resolve_model("there/tiny.gguf") / "model.safetensors")[embedding]
    monkeypatch.chdir(tmp_path / "there")
    torch.testing.assert_close(found, dequantised(tmp_path / "there" / "tiny.gguf").state_dict()[embedding], rtol=0, atol=0)


def test_two_processes_convert_a_file_once(tmp_path: Path, cache: Path) -> None:
    gguf = tiny_gguf(tmp_path / "tiny.gguf", Q8_0)
    command = [sys.executable, "-m", "loray.deployments.cli", "fetch", str(gguf)]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    outputs = [process.communicate() for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert {stdout.strip() for stdout, _ in outputs} == {str(cache / folders_in(cache)[0])}
    assert sorted("converted in" in stderr for _, stderr in outputs) == [False, True]


@pytest.mark.parametrize(("stored", "dtype"), [(Q4_1, "float16"), (BF16, "float32")])
def test_the_folder_is_as_fine_as_the_files_matrices(tmp_path: Path, stored: GGMLQuantizationType, dtype: str) -> None:
    gguf = tiny_gguf(tmp_path / "tiny.gguf", stored)
    folder = resolve_model(str(gguf))
    assert read_config(folder)["dtype"] == dtype
    expected = dequantised(gguf).state_dict()
    found = load_file(folder / "model.safetensors")
    assert set(expected) - set(found) == {"lm_head.weight"}  # tied
    for name, tensor in found.items():
        assert tensor.dtype == getattr(torch, dtype)
        assert torch.equal(tensor, expected[name].to(tensor.dtype)), name


def test_a_quantised_file_is_served_with_transformers_numbers(tmp_path: Path) -> None:
    folder = resolve_model(str(tiny_gguf(tmp_path / "tiny.gguf", Q8_0)))
    tokens, logprobs = oracle_generate(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval(), PROMPT)
    output = Conductor(folder, max_total_tokens=64).generate(PROMPT)
    assert output.token_ids == tokens
    torch.testing.assert_close(torch.tensor(output.logprobs), torch.tensor(logprobs), rtol=0, atol=1e-4)


def test_the_rotary_factors_of_llama_3_are_kept(tmp_path: Path) -> None:
    """llama.cpp stores how far each frequency is stretched; transformers' own reader leaves it out."""
    llama3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
    config = LlamaConfig(hidden_size=32, num_attention_heads=4, rope_parameters={"rope_theta": 10000.0, **llama3})
    stretched, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    factors = (1 / 10000 ** (torch.arange(0, 8, 2) / 8) / stretched).numpy()
    folder = resolve_model(str(tiny_gguf(tmp_path / "tiny.gguf", edit=lambda arrays: arrays | {"rope_freqs.weight": factors})))
    found = AutoModelForCausalLM.from_pretrained(folder).eval()
    config = AutoConfig.from_pretrained(folder, rope_parameters=config.rope_parameters)
    expected = AutoModelForCausalLM.from_pretrained(folder, config=config).eval()
    ids = torch.arange(3, 60)[None]
    torch.testing.assert_close(found(ids).logits, expected(ids).logits, rtol=0, atol=1e-4)
    tokens, logprobs = oracle_generate(expected, PROMPT)
    output = Conductor(folder, max_total_tokens=64).generate(PROMPT)
    assert output.token_ids == tokens
    torch.testing.assert_close(torch.tensor(output.logprobs), torch.tensor(logprobs), rtol=0, atol=1e-4)


def test_only_real_end_tokens_end_a_text(tmp_path: Path) -> None:
    """This tokenizer has no <|endoftext|>, and answers <unk> (0) when asked for it."""
    folder = resolve_model(str(tiny_gguf(tmp_path / "tiny.gguf", Q8_0, is_sentencepiece=True)))
    assert eos_token_ids(folder) == {2, 3}  # end of text, end of turn


@pytest.mark.parametrize(
    ("settings", "edit", "words"),
    [
        ({}, lambda content: b"not a model", "not a GGUF file"),
        ({}, lambda content: b"", "not a GGUF file"),
        ({}, lambda content: content[:-100], "cut short"),
        ({}, lambda content: content[:400], "cut short"),
        ({}, lambda content: content[:10], "cut short"),
        ({"architecture": "jais"}, bytes, "architecture jais is not supported"),
        ({"architecture": "t5"}, bytes, "AutoModelForCausalLM"),
        ({"edit": without_up_proj}, bytes, "lacks 1 of the model's tensors: model.layers.1.mlp.up_proj.weight"),
    ],
)
def test_a_file_that_is_no_model_is_refused_in_one_line_and_leaves_nothing(
    tmp_path: Path, cache: Path, settings: dict[str, Any], edit: Callable[[bytes], bytes], words: str
) -> None:
    gguf = tiny_gguf(tmp_path / "tiny.gguf", Q8_0, **settings)
    gguf.write_bytes(edit(gguf.read_bytes()))
    with pytest.raises(CheckpointError, match="tiny.gguf") as refusal:
        resolve_model(str(gguf))
    assert words in str(refusal.value)
    assert "\n" not in str(refusal.value)
    assert folders_in(cache) == []


def test_a_file_that_changes_while_it_is_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gguf = tiny_gguf(tmp_path / "tiny.gguf", Q8_0)
    convert = converted._convert

    def convert_and_touch(*arguments: Any) -> None:
        convert(*arguments)
        os.utime(gguf, ns=(0, 0))

    monkeypatch.setattr(converted, "_convert", convert_and_touch)
    with pytest.raises(CheckpointError, match="changed while it was read"):
        resolve_model(str(gguf))
