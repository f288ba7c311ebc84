"""Which class serves an architecture."""

from collections.abc import Callable

from transformers import PretrainedConfig

from loray.models.decoder import Decoder
from loray.models.gpt2 import GPT2LMHeadModel
from loray.models.gpt_neox import GPTNeoXForCausalLM
from loray.models.llama import LlamaForCausalLM
from loray.models.opt import OPTForCausalLM
from loray.models.parallel import Parallel

DecoderClass = Callable[[PretrainedConfig, Parallel, int], Decoder]  # config, parallel, max_total_tokens

ARCHITECTURES: dict[str, DecoderClass] = {
    "LlamaForCausalLM": LlamaForCausalLM,
    "MistralForCausalLM": LlamaForCausalLM,
    "Qwen2ForCausalLM": LlamaForCausalLM,
    "Qwen3ForCausalLM": LlamaForCausalLM,
    "GraniteForCausalLM": LlamaForCausalLM,
    "SolarForCausalLM": LlamaForCausalLM,
    "GemmaForCausalLM": LlamaForCausalLM,
    "Gemma2ForCausalLM": LlamaForCausalLM,
    "Gemma3ForCausalLM": LlamaForCausalLM,
    "Phi3ForCausalLM": LlamaForCausalLM,
    "GPTNeoXForCausalLM": GPTNeoXForCausalLM,
    "OPTForCausalLM": OPTForCausalLM,
    "GPT2LMHeadModel": GPT2LMHeadModel,
}


def model_class(config: PretrainedConfig) -> DecoderClass:
    for name in config.architectures or []:
        if name in ARCHITECTURES:
            return ARCHITECTURES[name]
    found = ", ".join(config.architectures or ["no architecture at all"])
    raise ValueError(f"the model's config.json names {found}; this server can serve {', '.join(sorted(ARCHITECTURES))}")
