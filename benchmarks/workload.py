"""What every peer is asked to do, and how its answer is summed up. The same prompts, adapters and token counts for all."""

import json
import statistics
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file

NEW_TOKENS = 64
ADAPTER_SETS = {"r16": [16] * 8, "mixed": [4, 8, 8, 16, 16, 32, 32, 64]}
LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class Case:
    """`adapters` is the set that the requests are spread over, "" for the base model."""

    name: str
    num_requests: int
    adapters: str = ""

    @property
    def prompts(self) -> list[str]:
        return [f"Tell me a story about number {i}." for i in range(self.num_requests)]

    @property
    def adapter_names(self) -> list[str]:
        names = [f"{self.adapters}-{i}" for i in range(len(ADAPTER_SETS.get(self.adapters, [])))]
        return [names[i % len(names)] if names else "" for i in range(self.num_requests)]


CASES = [Case("alone", 1), Case("16 base", 16), Case("16 over 8 r16", 16, "r16"), Case("16 over 8 mixed", 16, "mixed")]


@dataclass
class Arrivals:
    """When each token of each request arrived, in seconds."""

    started: float
    times: list[list[float]] = field(default_factory=list)

    def summary(self) -> dict[str, float]:
        num_tokens = sum(map(len, self.times))
        ended = max(times[-1] for times in self.times)
        gaps = [later - earlier for times in self.times for earlier, later in zip(times, times[1:], strict=False)]
        return {
            "tokens_per_s": round(num_tokens / (ended - self.started), 1),
            "ttft_ms_p50": round(1000 * statistics.median(times[0] - self.started for times in self.times), 1),
            "itl_ms_p50": round(1000 * statistics.median(gaps), 1),
            "itl_ms_p99": round(1000 * float(np.quantile(gaps, 0.99)), 1),
        }


def make_adapters(model: Path, root: Path) -> None:
    """PEFT folders with small random weights on all linears: speed does not depend on what they hold."""
    config = json.loads((model / "config.json").read_text())
    with safe_open(model / "model.safetensors", "numpy") as file:
        shapes = {key: file.get_slice(key).get_shape() for key in file.keys()}  # noqa: SIM118
    for set_name, ranks in ADAPTER_SETS.items():
        for i, rank in enumerate(ranks):
            folder = root / f"{set_name}-{i}"
            folder.mkdir(parents=True, exist_ok=True)
            rng = np.random.default_rng(i)
            tensors = {}
            for layer in range(config["num_hidden_layers"]):
                for name, (out, inputs) in _linears(shapes, layer):
                    prefix = f"base_model.model.{name}"
                    tensors[f"{prefix}.lora_A.weight"] = rng.normal(0, 0.02, (rank, inputs)).astype(np.float32)
                    tensors[f"{prefix}.lora_B.weight"] = rng.normal(0, 0.02, (out, rank)).astype(np.float32)
            save_file(tensors, folder / "adapter_model.safetensors")
            settings = {
                "peft_type": "LORA",
                "task_type": "CAUSAL_LM",
                "r": rank,
                "lora_alpha": rank,
                "target_modules": list(LINEARS),
                "bias": "none",
            }
            (folder / "adapter_config.json").write_text(json.dumps(settings))


def _linears(shapes: dict[str, list[int]], layer: int) -> list[tuple[str, list[int]]]:
    names = [name for name in shapes if f".layers.{layer}." in name and name.rsplit(".", 2)[1] in LINEARS]
    return [(name.removesuffix(".weight"), shapes[name]) for name in sorted(names)]
