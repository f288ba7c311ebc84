"""Every switch of a config and every trait of a family counts: the server does what transformers does, which is not what it would
do without it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from loray.kernels.delta import Parted
from loray.models.attention import Rope
from loray.models.batch import Batch
from loray.models.loader import WeightsError
from loray.models.step import Admission, Row, Sampling
from tests.models.conductor import prompt_of
from tests.models.families import FAMILIES, base_oracle, config_of, random_model
from tests.models.rank_jobs import Recorder
from tests.models.test_llama import ROPES

pytestmark = pytest.mark.slow

TOLERANCE = 2e-5  # the two forms of GELU make no more than 3e-4 of a difference
CLEARLY = 10 * TOLERANCE
PROMPT = prompt_of(64)  # as long as the server admits: so transformers' dynamic frequencies are its own
Settings = dict[str, Any]
PLAIN_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
FULL, SLIDING = "full_attention", "sliding_attention"

SWITCHES: list[tuple[str, Settings, Settings]] = [  # family, the switch as it is tested, and as it is ignored
    ("gpt_neox", {"rotary_pct": 0.5}, {"rotary_pct": 1.0}),
    ("gpt_neox", {"rotary_pct": 1.0, "rotary_emb_base": 500}, {"rotary_emb_base": 10000}),
    ("gpt_neox", {"use_parallel_residual": True}, {"use_parallel_residual": False}),
    ("gpt_neox", {"use_parallel_residual": False}, {"use_parallel_residual": True}),
    ("gpt_neox", {"hidden_act": "gelu_new"}, {"hidden_act": "gelu"}),
    ("gpt_neox", {"hidden_act": "gelu"}, {"hidden_act": "gelu_new"}),
    ("gpt_neox", {"attention_bias": False}, {"attention_bias": True}),
    ("gpt_neox", {"attention_bias": True}, {"attention_bias": False}),
    ("gpt_neox", {"layer_norm_eps": 0.1}, {"layer_norm_eps": 1e-5}),
    ("gpt_neox", {"tie_word_embeddings": True}, {"tie_word_embeddings": False}),
    ("opt", {"do_layer_norm_before": False}, {"do_layer_norm_before": True}),
    ("opt", {"do_layer_norm_before": True}, {"do_layer_norm_before": False}),
    ("opt", {"enable_bias": False}, {"enable_bias": True}),
    ("opt", {"layer_norm_elementwise_affine": False}, {"layer_norm_elementwise_affine": True}),
    ("opt", {"_remove_final_layer_norm": True}, {"_remove_final_layer_norm": False}),
    ("opt", {"activation_function": "gelu"}, {"activation_function": "relu"}),
    ("opt", {"tie_word_embeddings": False}, {"tie_word_embeddings": True}),
    ("gpt2", {"scale_attn_weights": False}, {"scale_attn_weights": True}),
    ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, {"scale_attn_by_inverse_layer_idx": False}),
    ("gpt2", {"scale_attn_by_inverse_layer_idx": False}, {"scale_attn_by_inverse_layer_idx": True}),
    ("gpt2", {"activation_function": "gelu"}, {"activation_function": "gelu_new"}),
    ("gpt2", {"layer_norm_epsilon": 0.1}, {"layer_norm_epsilon": 1e-5}),
    ("gpt2", {"tie_word_embeddings": False}, {"tie_word_embeddings": True}),
    ("llama", {"attention_bias": True}, {"attention_bias": False}),
    ("llama", {"mlp_bias": True}, {"mlp_bias": False}),
    ("llama", {"hidden_act": "gelu"}, {"hidden_act": "silu"}),
    ("llama", {"rms_norm_eps": 0.1}, {"rms_norm_eps": 1e-6}),
    ("llama", {"tie_word_embeddings": True}, {"tie_word_embeddings": False}),
    ("llama", {"tie_word_embeddings": False}, {"tie_word_embeddings": True}),
    *(
        ("llama", {"head_dim": 8, "rope_parameters": rope}, {"head_dim": 8, "rope_parameters": PLAIN_ROPE})
        for name, rope in ROPES.items()
        if name != "dynamic_within"
    ),
    (
        "llama",
        {"rope_parameters": {**PLAIN_ROPE, "rope_type": "dynamic", "factor": 2.0}, "max_position_embeddings": 32},
        {"rope_parameters": PLAIN_ROPE},
    ),
    ("mistral", {"sliding_window": 9}, {"sliding_window": None}),
    ("mistral", {"sliding_window": 9}, {"sliding_window": 10}),
    ("qwen2", {"layer_types": [SLIDING, FULL]}, {"layer_types": [FULL, FULL]}),
    ("qwen2", {"layer_types": [SLIDING, FULL]}, {"layer_types": [SLIDING, SLIDING]}),
    ("qwen3", {"attention_bias": True}, {"attention_bias": False}),
    ("qwen3", {"use_sliding_window": True, "sliding_window": 9, "layer_types": [FULL, SLIDING]}, {"layer_types": [FULL, FULL]}),
    ("granite", {"attention_multiplier": 0.3}, {"attention_multiplier": 48**-0.5}),
    ("granite", {"embedding_multiplier": 2.0}, {"embedding_multiplier": 1.0}),
    ("granite", {"residual_multiplier": 0.5}, {"residual_multiplier": 1.0}),
    ("granite", {"logits_scaling": 0.5}, {"logits_scaling": 1.0}),
    ("granite", {"attention_bias": True, "mlp_bias": True}, {"attention_bias": False, "mlp_bias": False}),
    ("solar", {"bskcn_tv": [0.9, 0.3]}, {"bskcn_tv": [0.3, 0.9]}),
    ("solar", {"bskcn_3": [2, 4]}, {"bskcn_3": [4]}),
    ("solar", {"bskcn_4": [3]}, {"bskcn_4": []}),
    ("gemma", {"hidden_act": "silu"}, {"hidden_act": "gelu_pytorch_tanh"}),
    ("gemma", {"tie_word_embeddings": True}, {"tie_word_embeddings": False}),
    ("gemma", {"attention_bias": True}, {"attention_bias": False}),
    ("gemma2", {"attn_logit_softcapping": 2.0}, {"attn_logit_softcapping": None}),
    ("gemma2", {"final_logit_softcapping": 9.0}, {"final_logit_softcapping": None}),
    ("gemma2", {"attn_logit_softcapping": None, "final_logit_softcapping": None}, {"attn_logit_softcapping": 2.0}),
    ("gemma2", {"hidden_activation": "gelu"}, {"hidden_activation": "gelu_pytorch_tanh"}),
    ("gemma2", {"query_pre_attn_scalar": 7}, {"query_pre_attn_scalar": 10}),
    ("gemma2", {"layer_types": [FULL, SLIDING]}, {"layer_types": [SLIDING, FULL]}),
    ("gemma3", {"final_logit_softcapping": 9.0}, {"final_logit_softcapping": None}),
    ("gemma3", {"query_pre_attn_scalar": 7}, {"query_pre_attn_scalar": 10}),
    ("gemma3", {"layer_types": [FULL, SLIDING]}, {"layer_types": [SLIDING, FULL]}),
    (
        "gemma3",
        {
            "rope_parameters": {
                FULL: {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                SLIDING: {**PLAIN_ROPE, "rope_theta": 500.0},
            }
        },
        {"rope_parameters": {FULL: {**PLAIN_ROPE, "rope_theta": 1e6}, SLIDING: PLAIN_ROPE}},
    ),
    ("phi3", {"sliding_window": 9}, {"sliding_window": None}),
    ("phi3", {"partial_rotary_factor": 0.5}, {"partial_rotary_factor": 1.0}),
]


def named(switch: Any) -> str:
    return switch if isinstance(switch, str) else ",".join(f"{key}={value}" for key, value in switch.items())[:60]


@torch.inference_mode()
def logits_of(model: PreTrainedModel) -> Tensor:
    return model(input_ids=torch.tensor([PROMPT])).logits[0, -1]


def served_logits(folder: Path) -> Tensor:
    """Of the prompt's last token; the prefill comes in two chunks."""
    recorder = Recorder(folder, max_total_tokens=len(PROMPT))
    admission = Admission(0, PROMPT, [], 0, [], Sampling())
    recorder.step([Row(0, 40, recorder.blocks(0, 0, 40), False)], [admission])
    recorder.step([Row(0, 24, recorder.blocks(0, 40, 64), True)])
    return torch.from_numpy(recorder.logits[0][0])


def saved(family: str, folder: Path, **settings: Any) -> PreTrainedModel:
    model = random_model(config_of(FAMILIES[family], **settings), FAMILIES[family].norm_center)
    model.save_pretrained(folder)
    return model


def assert_served_as_transformers_does(folder: Path) -> Tensor:
    expected = logits_of(base_oracle(folder))
    torch.testing.assert_close(served_logits(folder), expected, atol=TOLERANCE, rtol=0)
    return expected


@pytest.mark.parametrize(("family", "switch", "ignored"), SWITCHES, ids=named)
def test_a_switch_counts(family: str, switch: Settings, ignored: Settings, tmp_path: Path) -> None:
    model = saved(family, tmp_path, **switch)
    expected = assert_served_as_transformers_does(tmp_path)
    other = random_model(config_of(FAMILIES[family], **{**switch, **ignored}), FAMILIES[family].norm_center, seed=1)
    other.load_state_dict(dict(model.named_parameters()), strict=False)  # a tied head counts as its embedding only
    assert (logits_of(other) - expected).abs().max() > CLEARLY


def without_qk_norm(model: PreTrainedModel) -> None:
    for layer in model.model.layers:
        layer.self_attn.q_norm = layer.self_attn.k_norm = nn.Identity()


def without_norm_offset(model: PreTrainedModel) -> None:
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.data -= 1


def without_embedding_scale(model: PreTrainedModel) -> None:
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())  # no longer the embedding's
    model.model.embed_tokens.weight.data /= model.config.hidden_size**0.5


def without_position_offset(model: PreTrainedModel) -> None:
    positions = model.model.decoder.embed_positions.weight.data
    positions[2:] = positions[:-2].clone()


def without_qkv_bias(model: PreTrainedModel) -> None:
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.data.zero_()


TRAITS: list[tuple[str, Callable[[PreTrainedModel], None]]] = [
    ("qwen2", without_qkv_bias),
    ("qwen3", without_qk_norm),
    ("gemma3", without_qk_norm),
    ("gemma", without_norm_offset),
    ("gemma", without_embedding_scale),
    ("gemma2", without_embedding_scale),
    ("opt", without_position_offset),
]


@pytest.mark.parametrize(("family", "drop"), TRAITS)
def test_a_trait_counts(family: str, drop: Callable[[PreTrainedModel], None], tmp_path: Path) -> None:
    model = saved(family, tmp_path)
    expected = assert_served_as_transformers_does(tmp_path)
    drop(model)
    assert (logits_of(model) - expected).abs().max() > CLEARLY


@pytest.mark.parametrize(
    ("family", "switch", "value"),
    [("opt_post_norm", "word_embed_proj_dim", 40), ("gpt2", "n_inner", None), ("gpt2", "n_inner", 80), ("llama", "head_dim", 4)],
)
def test_a_switch_that_changes_shapes_counts(family: str, switch: str, value: int | None, tmp_path: Path) -> None:
    saved(family, tmp_path)
    assert_served_as_transformers_does(tmp_path)
    config = json.loads((tmp_path / "config.json").read_bytes())
    (tmp_path / "config.json").write_text(json.dumps({**config, switch: value}))
    with pytest.raises(WeightsError):
        Recorder(tmp_path)


OLD_SPELLINGS: list[tuple[str, Settings, Settings]] = [  # family, settings, and how older checkpoints write them into config.json
    ("gpt_neox", {"rotary_pct": 0.5, "rotary_emb_base": 500}, {"rotary_pct": 0.5, "rotary_emb_base": 500}),
    (
        "llama",
        {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 500.0}},
        {"rope_theta": 500.0, "rope_scaling": {"type": "linear", "factor": 4.0}},
    ),
    ("phi3", {"partial_rotary_factor": 0.5}, {"partial_rotary_factor": 0.5, "rope_theta": 10000.0, "rope_scaling": None}),
]


@pytest.mark.parametrize(("family", "settings", "spelling"), OLD_SPELLINGS, ids=named)
def test_the_spelling_of_older_configs_counts(family: str, settings: Settings, spelling: Settings, tmp_path: Path) -> None:
    expected = logits_of(saved(family, tmp_path, **settings))
    config = json.loads((tmp_path / "config.json").read_bytes())
    del config["rope_parameters"]
    (tmp_path / "config.json").write_text(json.dumps({**config, **spelling}))
    torch.testing.assert_close(served_logits(tmp_path), expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("is_upcast", [True, False])
def test_reorder_and_upcast_attn_attends_in_float32(is_upcast: bool, tmp_path: Path) -> None:
    """In bfloat16; in float32 the switch changes nothing."""
    saved("gpt2", tmp_path, reorder_and_upcast_attn=is_upcast, scale_attn_by_inverse_layer_idx=False)
    recorder = Recorder(tmp_path, dtype=torch.bfloat16)
    attn: Any = recorder.runner._model.get_submodule("transformer.h.0.attn")
    attention, seen = attn.attention, []

    def recorded(qkv: Parted, rope: Rope | None, kv_cache: Tensor, batch: Batch) -> Tensor:
        seen.append((qkv.y.clone(), attention(qkv, rope, kv_cache, batch)))
        return seen[-1][1]

    attn.attention = recorded
    recorder.generate(PROMPT, num_new=1)
    qkv, attended = seen[0]
    q, k, v = qkv.float().view(len(PROMPT), 3, 5, 8).permute(1, 2, 0, 3)  # each [heads, tokens, head_dim]
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(0, 1).reshape(len(PROMPT), -1)
    others = (attended != expected.bfloat16()).float().mean()
    assert (others < 0.01) if is_upcast else (others > 0.1)  # a few lie between two numbers
