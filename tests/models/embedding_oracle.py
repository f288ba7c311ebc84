"""What transformers and PEFT make of a text: its final hidden states, pooled."""

from pathlib import Path

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from loray.models.step import Pooling


def oracle(base: Path, adapter: Path | None = None) -> torch.nn.Module:
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    return (PeftModel.from_pretrained(model, adapter) if adapter else model).eval()


@torch.inference_mode()
def oracle_embedding(model: torch.nn.Module, prompt: list[int], pooling: Pooling) -> list[float]:
    """Of the bare model's last_hidden_state."""
    bare = model.get_base_model().base_model if isinstance(model, PeftModel) else model.base_model
    assert isinstance(bare, torch.nn.Module)
    hidden = bare(input_ids=torch.tensor([prompt])).last_hidden_state[0]
    return (hidden.mean(0) if pooling == "mean" else hidden[-1]).tolist()
