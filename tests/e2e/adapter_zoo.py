"""Random adapters by the dozen, written without a model at hand."""

import json
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from loray.models.adapter import CONFIG_FILE, WEIGHTS_FILE


def random_adapter(like: Path, folder: Path, rank: int, seed: int, std: float = 0.15) -> Path:
    """An adapter of the modules of another one, of any rank; alpha is the rank, so its scale is 1."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    with safe_open(like / WEIGHTS_FILE, "pt") as file:
        for name in list(file.keys()):
            rows, columns = file.get_slice(name).get_shape()
            shape = (rank, columns) if ".lora_A." in name else (rows, rank)
            tensors[name] = torch.randn(shape, generator=generator) * std
    config = json.loads((like / CONFIG_FILE).read_text()) | {"r": rank, "lora_alpha": rank}
    folder.mkdir(parents=True)
    save_file(tensors, folder / WEIGHTS_FILE)
    (folder / CONFIG_FILE).write_text(json.dumps(config))
    return folder
