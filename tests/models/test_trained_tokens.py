"""Trained tokens of a head: its own, or those of the embedding where PEFT has tied the two; else the adapter is refused."""

from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from torch import Tensor

from loray.models.adapter import WEIGHTS_FILE, AdapterError
from tests.models.conductor import Conductor
from tests.models.families import FAMILIES, base_oracle, config_of, random_model
from tests.models.peft_items import TRAINED_TOKENS, save_item
from tests.models.rank_jobs import Recorder

pytestmark = pytest.mark.slow  # PEFT's models

OF_EMBEDDING, OF_HEAD = f"base_model.model.model.embed_tokens.{TRAINED_TOKENS}", f"base_model.model.lm_head.{TRAINED_TOKENS}"
SAME = {"target_modules": ["k_proj"], "trainable_token_indices": {"embed_tokens": [5, 9], "lm_head": [5, 9]}}


def saved(folder: Path, is_tied: bool) -> tuple[Path, Path]:
    """A base model, and an adapter with the same trained tokens for the embedding and the head."""
    family, base = FAMILIES["llama"], folder / "base"
    random_model(config_of(family, tie_word_embeddings=is_tied), family.norm_center, family.seed).save_pretrained(base)
    return base, save_item(base, folder / "mine", SAME)


def change(adapter: Path, tensors: dict[str, Tensor | None]) -> None:
    """None: without it."""
    changed = load_file(adapter / WEIGHTS_FILE) | tensors
    save_file({name: tensor for name, tensor in changed.items() if tensor is not None}, adapter / WEIGHTS_FILE)


def reason(base: Path, adapter: Path) -> str:
    with pytest.raises(AdapterError) as caught:
        Conductor(base).runner.host_adapters.prepare(str(adapter), "")
    return str(caught.value)


@pytest.mark.parametrize("is_tied", [True, False], ids=["tied", "untied"])
def test_the_same_tokens_of_the_embedding_and_the_head_equal_peft(tmp_path: Path, is_tied: bool) -> None:
    base, adapter = saved(tmp_path, is_tied)
    assert (OF_HEAD in load_file(adapter / WEIGHTS_FILE)) != is_tied
    recorder = Recorder(base)
    recorder.load(adapter, recorder.pages["r8"])
    played = recorder.record(("r8",), num_new=6)[0]
    oracle = PeftModel.from_pretrained(base_oracle(base), adapter).eval()
    logits = oracle(input_ids=torch.tensor([played.prompt + played.token_ids])).logits[0, len(played.prompt) - 1 : -1]
    torch.testing.assert_close(torch.from_numpy(played.logits), logits.detach(), atol=1e-4, rtol=0)


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
