"""Fields of config.json that a family's own class ignores change nothing; what can't be served is refused in one line."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from loray.models.architectures import UnsupportedModel, choose
from tests.models.conductor import Conductor, Request, prompt_of
from tests.models.families import FAMILIES, base_oracle, config_of, random_model
from tests.models.tiny_llama import oracle_generate

IGNORED: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"sliding_window": 5}),
    ("llama", {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]}),
    ("granite", {"partial_rotary_factor": 0.5}),
    ("gemma", {"sliding_window": 5}),
    ("gemma", {"hidden_activation": "relu"}),
    ("granite", {"sliding_window": 5}),
    ("solar", {"sliding_window": 5}),
    ("mistral", {"attention_bias": True}),
    ("phi3", {"attention_bias": True}),
    ("gemma2", {"mlp_bias": True}),
    ("gemma3", {"attn_logit_softcapping": 2.0}),
]


def save(folder: Path, name: str, **fields: Any) -> Path:
    family = FAMILIES[name]
    random_model(config_of(family), family.norm_center, family.seed).save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | fields))
    return folder


@pytest.mark.parametrize(("name", "fields"), IGNORED)
def test_a_field_that_transformers_ignores_changes_nothing(tmp_path: Path, name: str, fields: dict[str, Any]) -> None:
    save(tmp_path, name, **fields)
    tokens, logprobs = oracle_generate(base_oracle(tmp_path), prompt_of(20))
    output = Conductor(tmp_path).generate(prompt_of(20))
    assert output.token_ids == tokens
    assert output.logprobs == pytest.approx(logprobs, abs=1e-4)


@pytest.mark.parametrize(
    ("name", "fields", "words"),
    [
        ("gemma3", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("gpt2", {"add_cross_attention": True}, "add_cross_attention"),
        ("llama", {"model_type": "olmo2"}, "model_type 'olmo2' is none of Llama's family"),
        ("llama", {"hidden_act": "swoosh"}, "activation 'swoosh' is not known"),
    ],
)
def test_a_config_that_can_not_be_served_is_refused_by_its_field(tmp_path: Path, name: str, fields: dict[str, Any], words: str) -> None:
    save(tmp_path, name, **fields)
    with pytest.raises(ValueError, match=words):
        Conductor(tmp_path)


@pytest.mark.parametrize("quantization", [{"quant_method": "gptq", "bits": 4}, {"quant_method": "fp8"}])
def test_quantised_weights_are_refused_by_their_method(quantization: dict[str, Any]) -> None:
    config = {"architectures": ["LlamaForCausalLM"], "quantization_config": quantization}
    with pytest.raises(UnsupportedModel, match=quantization["quant_method"]):
        choose(config, "auto", False)
    assert choose(config, "transformers", False) == "transformers"


def test_models_that_keep_a_state_beside_keys_are_refused() -> None:
    with pytest.raises(UnsupportedModel, match="JambaForCausalLM"):
        choose({"architectures": ["JambaForCausalLM"]}, "auto", False)


def test_an_untied_head_takes_what_the_projection_gives(tmp_path: Path) -> None:
    family = FAMILIES["opt_post_norm"]
    random_model(config_of(family, tie_word_embeddings=False), seed=family.seed).save_pretrained(tmp_path)
    tokens, _ = oracle_generate(base_oracle(tmp_path), prompt_of(20))
    assert Conductor(tmp_path).generate(prompt_of(20)).token_ids == tokens


@pytest.mark.parametrize("name", ["gpt2", "opt"])
def test_a_row_one_step_beyond_the_last_learned_position_harms_nobody(tmp_path: Path, name: str) -> None:
    """The driver plans one step ahead: a sequence that ended at its last position may run once more."""
    save(tmp_path, name)
    conductor = Conductor(tmp_path, max_total_tokens=128)
    assert len(conductor.generate(prompt_of(120), num_new=9).token_ids) == 9


def test_attention_in_float32_takes_the_mask_of_a_model_in_half_precision(tmp_path: Path) -> None:
    save(tmp_path, "gpt2", reorder_and_upcast_attn=True)
    requests = [Request(prompt_of(9), num_new=4), Request(prompt_of(20), num_new=4)]
    first, second = Conductor(tmp_path, dtype=torch.bfloat16).play(requests, chunk=5, stagger=1)
    assert len(first.token_ids) == len(second.token_ids) == 4
