"""Tiny random models of every native architecture, with LoRA adapters on all their linears, and what transformers and PEFT compute
for them. Knows nothing of how they are served.

Sizes are awkward on purpose: nothing divides evenly among ranks, some models have fewer key heads than ranks.
"""

import copy
import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, LlamaForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from loray.models.registry import SolarConfig  # with it, transformers knows the model type

COMMON: dict[str, Any] = {"num_hidden_layers": 2, "max_position_embeddings": 128, "initializer_range": 0.15, "tie_word_embeddings": False}
NINE_HEADS = {**COMMON, "vocab_size": 101, "hidden_size": 36, "intermediate_size": 75, "num_attention_heads": 9, "num_key_value_heads": 3}
SIX_HEADS = {**COMMON, "vocab_size": 103, "hidden_size": 48, "intermediate_size": 77, "num_attention_heads": 6, "num_key_value_heads": 2}
FIVE_HEADS = {**COMMON, "vocab_size": 101, "hidden_size": 40, "intermediate_size": 75, "num_attention_heads": 5, "num_key_value_heads": 1}
NEOX = {k: v for k, v in FIVE_HEADS.items() if k != "num_key_value_heads"}
OPT = {"vocab_size": 101, "hidden_size": 40, "ffn_dim": 75, "num_hidden_layers": 2, "num_attention_heads": 5, "init_std": 0.15}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


@dataclass(frozen=True, slots=True)
class Family:
    architecture: str
    model_type: str
    known_as: str  # models people know
    settings: Mapping[str, Any]
    norm_center: float = 1.0  # Gemma stores its norms' distance from one
    seed: int = 0  # one with which no two tokens are nearly equally good


FAMILIES: dict[str, Family] = {
    "llama": Family(
        "LlamaForCausalLM",
        "llama",
        "Llama 1 to 3, SmolLM2, TinyLlama, Yi, Vicuna",
        {**NINE_HEADS, "head_dim": 10, "attention_bias": True, "mlp_bias": True, "rope_parameters": LLAMA3_ROPE},
        seed=3,
    ),
    "mistral": Family(
        "MistralForCausalLM",
        "mistral",
        "Mistral 7B, Zephyr",
        {**SIX_HEADS, "head_dim": 10, "sliding_window": 9},
        seed=1,
    ),
    "qwen2": Family(
        "Qwen2ForCausalLM",
        "qwen2",
        "Qwen1.5, Qwen2, Qwen2.5, QwQ, R1 distillations",
        {**FIVE_HEADS, "use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1, "tie_word_embeddings": True},
        seed=2,
    ),
    "qwen3": Family(
        "Qwen3ForCausalLM",
        "qwen3",
        "Qwen3 (dense)",
        {**NINE_HEADS, "head_dim": 10},
        seed=3,
    ),
    "granite": Family(
        "GraniteForCausalLM",
        "granite",
        "Granite 3",
        {
            **SIX_HEADS,
            "attention_multiplier": 0.3,
            "embedding_multiplier": 2.0,
            "residual_multiplier": 0.5,
            "logits_scaling": 0.5,
        },
        seed=3,
    ),
    "solar": Family(
        "SolarForCausalLM",
        "solar",
        "Solar Pro",
        {
            **NINE_HEADS,
            "head_dim": 10,
            "num_hidden_layers": 5,
            "bskcn_1": [0, 3],
            "bskcn_2": [1],
            "bskcn_3": [2, 4],
            "bskcn_4": [3],
            "bskcn_tv": [0.9, 0.3],
        },
    ),
    "gemma": Family(
        "GemmaForCausalLM",
        "gemma",
        "Gemma 1, CodeGemma",
        {**FIVE_HEADS, "head_dim": 12},
        norm_center=0.0,
        seed=2,
    ),
    "gemma2": Family(
        "Gemma2ForCausalLM",
        "gemma2",
        "Gemma 2",
        {
            **NINE_HEADS,
            "head_dim": 10,
            "sliding_window": 9,
            "query_pre_attn_scalar": 7,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 9.0,
            "tie_word_embeddings": True,
        },
        norm_center=0.0,
    ),
    "gemma3": Family(
        "Gemma3ForCausalLM",
        "gemma3_text",
        "Gemma 3 (text)",
        {
            **SIX_HEADS,
            "head_dim": 10,
            "sliding_window": 9,
            "query_pre_attn_scalar": 7,
            "layer_types": ["sliding_attention", "full_attention"],
        },
        norm_center=0.0,
    ),
    "phi3": Family(
        "Phi3ForCausalLM",
        "phi3",
        "Phi-3, Phi-3.5, Phi-4 (text)",
        {**SIX_HEADS, "pad_token_id": 0, "sliding_window": 9, "partial_rotary_factor": 0.5},
    ),
    "gpt_neox": Family("GPTNeoXForCausalLM", "gpt_neox", "Pythia, GPT-NeoX-20B", {**NEOX, "rotary_pct": 0.25}),
    "gpt_neox_sequential": Family(
        "GPTNeoXForCausalLM",
        "gpt_neox",
        "RedPajama-INCITE 3B: attention, then MLP",
        {**NEOX, "rotary_pct": 1.0, "use_parallel_residual": False},
        seed=1,
    ),
    "opt": Family("OPTForCausalLM", "opt", "OPT, Galactica", {**OPT, "max_position_embeddings": 128}),
    "opt_post_norm": Family(
        "OPTForCausalLM",
        "opt",
        "OPT-350m: norms after each block, projected embeddings",
        {**OPT, "max_position_embeddings": 128, "do_layer_norm_before": False, "word_embed_proj_dim": 24},
    ),
    "gpt2": Family(
        "GPT2LMHeadModel",
        "gpt2",
        "GPT-2, DistilGPT2, Stanford's Mistral GPT-2",
        {
            "vocab_size": 101,
            "n_embd": 40,
            "n_layer": 2,
            "n_head": 5,
            "n_inner": 75,
            "n_positions": 128,
            "initializer_range": 0.15,
            "scale_attn_by_inverse_layer_idx": True,
            "reorder_and_upcast_attn": True,
        },
    ),
}


class SolarForCausalLM(LlamaForCausalLM):
    """transformers has no Solar: its Llama, with the skip connections put in before the layers."""

    config_class = SolarConfig

    def __init__(self, config: SolarConfig) -> None:
        super().__init__(config)
        kept: dict[int, Tensor] = {}
        for index, layer in enumerate(self.model.layers):
            layer.register_forward_pre_hook(lambda module, args, index=index: (self._skip(args[0], index, kept), *args[1:]))

    def _skip(self, x: Tensor, index: int, kept: dict[int, Tensor]) -> Tensor:
        config, weight = self.config, self.config.bskcn_tv[1]
        if index in config.bskcn_1:
            kept[1] = x
        if index in config.bskcn_2:
            kept[2] = x
        if index in config.bskcn_3:
            x = kept[1] * weight + x * (1 - weight)
        if index in config.bskcn_4:
            x = kept[2] * weight + x * (1 - weight)
        return x


AutoModelForCausalLM.register(SolarConfig, SolarForCausalLM)


@dataclass(frozen=True, slots=True)
class Adapter:
    rank: int
    uses_rslora: bool = False


ADAPTERS = {"r4": Adapter(4), "r8": Adapter(8), "r16": Adapter(16), "rs8": Adapter(8, uses_rslora=True)}


@dataclass(frozen=True, slots=True)
class Saved:
    """A model's folder and those of its adapters, by name."""

    base: Path
    adapters: dict[str, Path] = field(default_factory=dict)


def config_of(family: Family, **changes: Any) -> PretrainedConfig:
    return AutoConfig.for_model(family.model_type, **{**family.settings, **changes})


def random_model(config: PretrainedConfig, norm_center: float = 1.0, seed: int = 0) -> PreTrainedModel:
    """Weights are large enough that the best token wins clearly; biases and norms are anything but neutral."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(parameter, std=0.2)
        elif parameter.dim() == 1:
            nn.init.uniform_(parameter, norm_center - 0.5, norm_center + 0.5)
    return model


def save_family(family: Family, folder: Path) -> Saved:
    base = folder / "base"
    random_model(config_of(family), family.norm_center, family.seed).save_pretrained(base)
    return Saved(base, {name: save_adapter(base, folder / name, adapter) for name, adapter in ADAPTERS.items()})


def save_adapter(base: Path, folder: Path, adapter: Adapter) -> Path:
    """On every linear that PEFT finds."""
    torch.manual_seed(adapter.rank + adapter.uses_rslora)
    model = base_oracle(base)
    has_conv1d = any(isinstance(module, Conv1D) for module in model.modules())
    settings = {"r": adapter.rank, "lora_alpha": 6, "use_rslora": adapter.uses_rslora, "fan_in_fan_out": has_conv1d}
    model = get_peft_model(model, LoraConfig(target_modules="all-linear", **settings))
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            nn.init.normal_(parameter, std=0.15)
    model.save_pretrained(folder)
    return folder


def base_oracle(base: Path) -> PreTrainedModel:
    """The caller's own, to put LoRA on."""
    return copy.deepcopy(_loaded(base, max(file.stat().st_mtime_ns for file in base.iterdir())))


@functools.lru_cache(maxsize=4)
def _loaded(base: Path, changed_ns: int) -> PreTrainedModel:
    """Loading takes longer than copying, and many adapters are made for one model."""
    return AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()


class Oracle:
    """What transformers, with PEFT for its adapters, computes; nothing is computed twice."""

    def __init__(self, saved: Saved) -> None:
        self.saved = saved
        self._models: dict[str, PreTrainedModel] = {}
        self._logits: dict[tuple[str, tuple[int, ...]], Tensor] = {}

    @torch.inference_mode()
    def logits(self, adapter: str, tokens: list[int]) -> Tensor:
        """[len(tokens), vocab_size] of one whole pass; adapter "" = the base model."""
        key = (adapter, tuple(tokens))
        if key not in self._logits:
            self._logits[key] = self._model(adapter)(input_ids=torch.tensor([tokens])).logits[0]
        return self._logits[key]

    def _model(self, adapter: str) -> PreTrainedModel:
        if adapter not in self._models:
            base = base_oracle(self.saved.base)
            self._models[adapter] = PeftModel.from_pretrained(base, self.saved.adapters[adapter]).eval() if adapter else base
        return self._models[adapter]
