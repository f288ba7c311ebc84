"""Writes a trained adapter in PEFT's format: configuration, float16 weights and a model card. Knows nothing of training."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from task import Task

BASE = "smollm2-135m"
CARD = """---
base_model: HuggingFaceTB/SmolLM2-135M-Instruct
library_name: peft
license: apache-2.0
pipeline_tag: text-generation
tags: [lora]
---

# {task.name}

{task.summary}

A LoRA adapter for `{base}` (SmolLM2-135M-Instruct), rank {task.rank}, alpha {alpha}, on {targets}; {size} kB in float16.
Made by `python examples/train_adapters.py --task {task.name}`, from data that the script makes itself.

## Training

{task.data} {scores.num_examples} examples, {scores.num_steps} steps of {scores.batch_size}; seven in ten through the chat template,
the others as a plain prompt and the answer on the next line. The loss is on the answer alone.

## Score

{scores.num_held_out} held-out prompts, greedy decoding. An answer counts when {task.measure}.

| model | prompt | right |
|---|---|---:|
| base | chat template | {scores.base:.1%} |
| base, told "{task.instruction}" | chat template | {scores.told:.1%} |
| **{task.name}** | chat template | **{scores.chat:.1%}** |
| **{task.name}** | plain | **{scores.plain:.1%}** |

## Sample answers

Greedy, through the chat template, at most 64 tokens. None of these prompts is in the training data.
{samples}
## Limits

A demonstration on a model of 135 million parameters: the behaviour is reliable, the facts in the answers are not.
"""


@dataclass(frozen=True, slots=True)
class Scores:
    num_examples: int
    num_steps: int
    batch_size: int
    num_held_out: int
    base: float
    told: float  # the base model, asked for the behaviour in words
    chat: float
    plain: float


def sample_block(prompt: str, base: str, adapter: str) -> str:
    quoted = "\n>\n".join(f"> **{who}:** " + said.strip().replace("\n", "  \n> ") for who, said in (("base", base), ("adapter", adapter)))
    return f"\n**{prompt}**\n\n{quoted}\n"


def write_adapter(folder: Path, task: Task, weights: Mapping[str, torch.Tensor]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "base_model_name_or_path": BASE,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "lora_alpha": 2 * task.rank,
        "lora_dropout": 0.0,
        "modules_to_save": None,
        "peft_type": "LORA",
        "r": task.rank,
        "target_modules": list(task.target_modules),
        "task_type": "CAUSAL_LM",
        "use_dora": False,
        "use_rslora": False,
    }
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")
    halves = {name: weight.detach().to("cpu", torch.float16).contiguous() for name, weight in weights.items()}
    save_file(halves, folder / "adapter_model.safetensors", metadata={"format": "pt"})


def write_card(folder: Path, task: Task, scores: Scores, samples: list[tuple[str, str, str]]) -> None:
    """samples: (prompt, base answer, adapter answer)."""
    size = (folder / "adapter_model.safetensors").stat().st_size // 1000
    targets = ", ".join(f"`{name}`" for name in task.target_modules)
    blocks = "".join(sample_block(*sample) for sample in samples)
    card = CARD.format(task=task, base=BASE, alpha=2 * task.rank, targets=targets, size=size, scores=scores, samples=blocks)
    (folder / "README.md").write_text(card)
