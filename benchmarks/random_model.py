"""A model folder with random weights, for machines without network: `python -m benchmarks.random_model TOKENIZER OUT [field=value …]`

TOKENIZER is a folder with config.json and the tokenizer's files; fields change the config, such as hidden_size=4096.
"""

import json
import shutil
import sys
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM


def main(source: Path, out: Path, fields: list[str]) -> None:
    config = AutoConfig.from_pretrained(source)
    for field in fields:
        name, value = field.split("=", 1)
        assert hasattr(config, name), f"{type(config).__name__} has no {name}"
        setattr(config, name, json.loads(value))
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float16)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float16)
    model.save_pretrained(out)
    for file in source.glob("*token*"):
        shutil.copy(file, out)
    print(f"{sum(parameter.numel() for parameter in model.parameters()) / 1e6:.0f} million parameters in {out}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
