"""Which architectures can be served, and how. Names only: neither torch nor a model is imported for the native ones."""

from collections.abc import Mapping
from inspect import signature
from typing import Any, Literal

Implementation = Literal["native", "transformers"]

NATIVE = {  # architecture in config.json -> module and class here
    "LlamaForCausalLM": "llama.LlamaForCausalLM",
    "MistralForCausalLM": "llama.LlamaForCausalLM",
    "Qwen2ForCausalLM": "llama.LlamaForCausalLM",
    "Qwen3ForCausalLM": "llama.LlamaForCausalLM",
    "GraniteForCausalLM": "llama.LlamaForCausalLM",
    "SolarForCausalLM": "llama.LlamaForCausalLM",
    "GemmaForCausalLM": "llama.LlamaForCausalLM",
    "Gemma2ForCausalLM": "llama.LlamaForCausalLM",
    "Gemma3ForCausalLM": "llama.LlamaForCausalLM",
    "Phi3ForCausalLM": "llama.LlamaForCausalLM",
    "GPTNeoXForCausalLM": "gpt_neox.GPTNeoXForCausalLM",
    "OPTForCausalLM": "opt.OPTForCausalLM",
    "GPT2LMHeadModel": "gpt2.GPT2LMHeadModel",
}

SERVED = f"can be served: {', '.join(NATIVE)}, and through transformers others of its AutoModelForCausalLM that keep keys and values"


class UnsupportedModel(ValueError):
    """No way to serve this model as asked; the message is one line that says why and what can be served."""


def architecture_names(config: Mapping[str, Any]) -> list[str]:
    names = config.get("architectures") or []
    return [str(name) for name in (names if isinstance(names, list) else [names])]


def choose(config: Mapping[str, Any], wanted: Literal["auto"] | Implementation, trust_remote_code: bool) -> Implementation:
    """How a model with this config.json is served, if it can be."""
    names = architecture_names(config)
    found = ", ".join(names) or "no architecture at all"
    is_native = any(name in NATIVE for name in names)
    if wanted == "native" and not is_native:
        raise UnsupportedModel(f"model.implementation: native does not know {found}, only {', '.join(NATIVE)}")
    if is_native and wanted != "transformers":
        _check_plain(config)
        return "native"
    _check_transformers(config, names, found, trust_remote_code)
    return "transformers"


def _check_plain(config: Mapping[str, Any]) -> None:
    quantization = config.get("quantization_config")
    if quantization:
        method = quantization.get("quant_method", "no method named") if isinstance(quantization, dict) else quantization
        raise UnsupportedModel(
            f"model: its weights are quantised ({method}); serve the original, or set model.implementation: transformers "
            "where transformers can read them"
        )


def _check_transformers(config: Mapping[str, Any], names: list[str], found: str, trust_remote_code: bool) -> None:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    known = [name for name in names if name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()]
    if not known and "AutoModelForCausalLM" in (config.get("auto_map") or {}):
        if not trust_remote_code:
            raise UnsupportedModel(f"model: {found} comes with code of its own, which runs only with model.trust_remote_code: true")
    elif not known or config.get("is_encoder_decoder") or not _has_key_cache(known[0]):
        raise UnsupportedModel(f"model: {found} is no causal language model with a key-value cache; {SERVED}")


def _has_key_cache(name: str) -> bool:
    """Recurrent models keep a state instead, which can't be cut and joined row by row."""
    import transformers

    model = getattr(transformers, name)
    return "past_key_values" in signature(model.forward).parameters and not model._is_stateful
