"""Random Llama models and LoRA adapters small enough for a test, saved as transformers and PEFT save them, and what those compute."""

from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

ALL_LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
SIZES: dict[str, Any] = {
    "vocab_size": 101,
    "hidden_size": 48,
    "intermediate_size": 75,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
}


def save_llama(folder: Path, seed: int = 0, **changes: Any) -> Path:
    """Weights are large enough that logits differ clearly, so that greedy tokens do not hang on rounding."""
    torch.manual_seed(seed)
    settings = {**SIZES, "max_position_embeddings": 256, "tie_word_embeddings": False, "initializer_range": 0.15, **changes}
    model = LlamaForCausalLM(LlamaConfig(**settings))
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.3)
        elif "norm" in name:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    model.save_pretrained(folder)
    return folder


def save_adapter(base: Path, folder: Path, seed: int = 1, targets: list[str] | None = None, std: float = 0.15, **settings: Any) -> Path:
    torch.manual_seed(seed)
    model = get_peft_model(LlamaForCausalLM.from_pretrained(base), LoraConfig(target_modules=targets or ALL_LINEARS, **settings))
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=std)
    model.save_pretrained(folder)
    return folder


def oracle(base: Path, adapter: Path | None = None) -> torch.nn.Module:
    model = LlamaForCausalLM.from_pretrained(base, dtype=torch.float32)
    return (PeftModel.from_pretrained(model, adapter) if adapter else model).eval()


@torch.inference_mode()
def oracle_generate(model: torch.nn.Module, prompt: list[int], num_new: int = 8) -> tuple[list[int], list[float]]:
    """Greedy tokens and their log-probabilities, each from one forward pass over the whole sequence."""
    tokens, logprobs = list(prompt), []
    for _ in range(num_new):
        scores = model(input_ids=torch.tensor([tokens])).logits[0, -1].log_softmax(-1)
        tokens.append(int(scores.argmax()))
        logprobs.append(float(scores.max()))
    return tokens[len(prompt) :], logprobs
