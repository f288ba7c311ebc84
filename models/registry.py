"""Which class serves an architecture."""

from transformers import PretrainedConfig

from loray.models.llama import LlamaForCausalLM

ARCHITECTURES = {"LlamaForCausalLM": LlamaForCausalLM}


def model_class(config: PretrainedConfig) -> type[LlamaForCausalLM]:
    for name in config.architectures or []:
        if name in ARCHITECTURES:
            return ARCHITECTURES[name]
    found = ", ".join(config.architectures or ["no architecture at all"])
    raise ValueError(f"the model's config.json names {found}; this server can serve {', '.join(sorted(ARCHITECTURES))}")
