"""A PEFT folder for a model of one linear layer, without torch."""

import contextlib
import json
import os
import threading
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

SHAPES = {"model.layers.0.self_attn.q_proj": (16, 24)}
OTHER_SHAPES = {path: (inputs + 1, outputs) for path, (inputs, outputs) in SHAPES.items()}


def save_folder(folder: Path, rank: int, seed: int = 0, has_bias: bool = False) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    tensors = {}
    for path, (inputs, outputs) in SHAPES.items():
        tensors[f"base_model.model.{path}.lora_A.weight"] = rng.normal(size=(rank, inputs)).astype(np.float32)
        tensors[f"base_model.model.{path}.lora_B.weight"] = rng.normal(size=(outputs, rank)).astype(np.float32)
        if has_bias:
            tensors[f"base_model.model.{path}.lora_B.bias"] = rng.normal(size=outputs).astype(np.float32)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": ["q_proj"], "bias": "none", "lora_bias": has_bias}
    (folder / "adapter_config.json").write_text(json.dumps(config))


def make_pipe(file: Path) -> None:
    """Who reads it in spite of what it is gets nothing, but need not wait for it."""

    def write_nothing() -> None:
        with contextlib.suppress(FileNotFoundError):  # the test is over
            os.close(os.open(file, os.O_WRONLY))

    os.mkfifo(file)
    threading.Thread(target=write_nothing, daemon=True).start()
