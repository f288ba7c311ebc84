"""Trained tokens of a head: its own, or those of the embedding where PEFT has tied the two; else the adapter is refused. And copies of
the base model's weights, which PEFT saves under trained tokens where it is told to."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from loray.models.adapter import WEIGHTS_FILE, AdapterError
from loray.models.parallel import Parallel
from tests.models.conductor import Conductor
from tests.models.families import FAMILIES, base_oracle, config_of, random_model
from tests.models.peft_items import TRAINED_TOKENS, save_item
from tests.models.rank_jobs import Played, Recorder
from tests.models.rank_threads import ThreadGroup

pytestmark = pytest.mark.slow  # PEFT's models

OF_EMBEDDING, OF_HEAD = f"base_model.model.model.embed_tokens.{TRAINED_TOKENS}", f"base_model.model.lm_head.{TRAINED_TOKENS}"
SAME = {"embed_tokens": [5, 9], "lm_head": [5, 9]}
COPY = "token_adapter.base_layer.weight"
IS_TIED = pytest.mark.parametrize("is_tied", [True, False], ids=["tied", "untied"])


def saved(folder: Path, is_tied: bool, trained: Any = SAME, has_copies: bool = False) -> tuple[Path, Path]:
    """A base model, and an adapter with trained tokens."""
    family, base = FAMILIES["llama"], folder / "base"
    random_model(config_of(family, tie_word_embeddings=is_tied), family.norm_center, family.seed).save_pretrained(base)
    settings = {"target_modules": ["k_proj"], "trainable_token_indices": trained}
    return base, save_item(base, folder / "mine", settings, save_embedding_layers=has_copies or "auto")


def change(adapter: Path, tensors: dict[str, Tensor | None]) -> None:
    """None: without it."""
    changed = load_file(adapter / WEIGHTS_FILE) | tensors
    save_file({name: tensor for name, tensor in changed.items() if tensor is not None}, adapter / WEIGHTS_FILE)


def reason(base: Path, adapter: Path) -> str:
    with pytest.raises(AdapterError) as caught:
        Conductor(base).runner.host_adapters.prepare(str(adapter), "")
    return str(caught.value)


def play(parallel: Parallel, base: Path, adapter: Path) -> Played:
    recorder = Recorder(base, parallel)
    recorder.load(adapter, recorder.pages["r8"])
    return recorder.record(("r8",), num_new=6)[0]


def assert_equals_peft(base: Path, adapter: Path, world_size: int = 1) -> None:
    oracle = PeftModel.from_pretrained(base_oracle(base), adapter).eval()
    for played in ThreadGroup(world_size).run(play, base, adapter):
        logits = oracle(input_ids=torch.tensor([played.prompt + played.token_ids])).logits[0, len(played.prompt) - 1 : -1]
        torch.testing.assert_close(torch.from_numpy(played.logits), logits.detach(), atol=1e-4, rtol=0)


@IS_TIED
def test_the_same_tokens_of_the_embedding_and_the_head_equal_peft(tmp_path: Path, is_tied: bool) -> None:
    base, adapter = saved(tmp_path, is_tied)
    assert (OF_HEAD in load_file(adapter / WEIGHTS_FILE)) != is_tied
    assert_equals_peft(base, adapter)


@pytest.mark.parametrize("world_size", [1, 2])
@IS_TIED
@pytest.mark.parametrize("trained", [[5, 9], {"lm_head": [5, 9]}, {"embed_tokens": [5, 9], "lm_head": [100, 9, 2]}], ids=str)
def test_trained_tokens_with_copies_of_the_weights_under_them_equal_peft(
    tmp_path: Path, trained: Any, is_tied: bool, world_size: int
) -> None:
    base, adapter = saved(tmp_path, is_tied, trained, has_copies=True)
    if is_tied and isinstance(trained, list):
        assert reason(base, adapter).endswith(f"{OF_HEAD}: trainable_token_indices names no tokens of lm_head, so PEFT would not read it")
        change(adapter, {OF_HEAD: None})
    name = next(name for name in load_file(adapter / WEIGHTS_FILE) if name.endswith(COPY))
    assert_equals_peft(base, adapter, world_size)
    change(adapter, {name: load_file(adapter / WEIGHTS_FILE)[name] * 1.03})
    assert reason(base, adapter).endswith(f"tensor {name} is not the base model's own: modules trained as a whole are not supported")


@IS_TIED
@pytest.mark.parametrize("trained", [[94, 95], None], ids=["tokens", "no tokens"])
@pytest.mark.parametrize("vocab_size", [96, 104])
def test_a_vocabulary_that_was_resized_is_refused_as_that(tmp_path: Path, vocab_size: int, trained: Any, is_tied: bool) -> None:
    base, adapter = saved(tmp_path, is_tied)
    resized = AutoModelForCausalLM.from_pretrained(base)
    resized.resize_token_embeddings(vocab_size)
    config = LoraConfig(target_modules=["k_proj"], trainable_token_indices=trained)
    get_peft_model(resized, config).save_pretrained(tmp_path / "resized")
    message = rf"has shape \({vocab_size}, 36\), the base model and the config need \(101, 36\): the adapter was made with a resized voc"
    assert re.search(message, reason(base, tmp_path / "resized"))


@pytest.mark.parametrize(("is_tied", "missing"), [(False, OF_HEAD), (False, OF_EMBEDDING), (True, OF_EMBEDDING)])
def test_tokens_that_peft_would_look_for_in_vain_are_refused(tmp_path: Path, is_tied: bool, missing: str) -> None:
    base, adapter = saved(tmp_path, is_tied)
    change(adapter, {OF_HEAD: load_file(adapter / WEIGHTS_FILE)[OF_EMBEDDING], missing: None})
    with pytest.raises(KeyError, match=missing):
        PeftModel.from_pretrained(base_oracle(base), adapter)
    path = missing.removeprefix("base_model.model.").removesuffix(f".{TRAINED_TOKENS}")
    assert reason(base, adapter) == f"adapter 'mine': trainable_token_indices names tokens of {path}, but they are not among the tensors"


def test_tokens_of_a_tied_head_that_peft_would_not_read_are_refused(tmp_path: Path) -> None:
    base, adapter = saved(tmp_path, is_tied=True)
    change(adapter, {OF_HEAD: torch.randn(2, 36)})
    assert reason(base, adapter) == f"adapter 'mine': tensor {OF_HEAD}: lm_head is tied to the embedding, so PEFT would not read it"
