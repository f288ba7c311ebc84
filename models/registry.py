"""Which class serves an architecture."""

from transformers import PretrainedConfig

from loray.models.decoder import Decoder
from loray.models.gpt2 import GPT2LMHeadModel
from loray.models.gpt_neox import GPTNeoXForCausalLM
from loray.models.llama import LlamaForCausalLM
from loray.models.opt import OPTForCausalLM

ARCHITECTURES: dict[str, type[Decoder]] = {
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


def model_class(config: PretrainedConfig) -> type[Decoder]:
    for name in config.architectures or []:
        if name in ARCHITECTURES:
            return ARCHITECTURES[name]
    found = ", ".join(config.architectures or ["no architecture at all"])
    raise ValueError(f"the model's config.json names {found}; this server can serve {', '.join(sorted(ARCHITECTURES))}")
