"""transformers `generate` and PEFT on the same workload: `python -m benchmarks.peer_transformers MODEL ADAPTERS`."""

import json
import sys
import time
from pathlib import Path

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.workload import CASES, NEW_TOKENS


def main(model: Path, adapters: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model, padding_side="left", pad_token="<|endoftext|>")
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    options = {"do_sample": False, "pad_token_id": tokenizer.pad_token_id}
    for case in CASES:
        inputs = tokenizer(case.prompts, return_tensors="pt", padding=True)
        peft = {}
        network = base
        if case.adapters:
            names = sorted(set(case.adapter_names))
            network = PeftModel.from_pretrained(base, adapters / names[0], names[0]).eval()
            for name in names[1:]:
                network.load_adapter(adapters / name, name)
            peft = {"adapter_names": case.adapter_names}
        network.generate(**inputs, **peft, max_new_tokens=2, **options)
        started = time.perf_counter()
        network.generate(**inputs, **peft, max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS, **options)
        rate = case.num_requests * NEW_TOKENS / (time.perf_counter() - started)
        print(json.dumps({"case": case.name, "tokens_per_s": round(rate, 1)}), flush=True)
        if case.adapters:
            base = network.unload()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
