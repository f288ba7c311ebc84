"""transformers `generate` and PEFT on the same workload: `python -m benchmarks.peer_transformers MODEL ADAPTERS`."""

import json
import sys
import time
from pathlib import Path

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer, StoppingCriteria

from benchmarks.workload import CASES, NEW_TOKENS, Arrivals


class Clock(StoppingCriteria):
    """Stops nothing; notes when each token came, to all rows at once."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: object, **kwargs: object) -> torch.Tensor:  # type: ignore[override]
        self.times.append(time.perf_counter())
        return torch.zeros(len(input_ids), dtype=torch.bool)


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
        clock = Clock()
        started = time.perf_counter()
        network.generate(**inputs, **peft, max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS, stopping_criteria=[clock], **options)
        arrivals = Arrivals(started, [clock.times] * case.num_requests)
        print(json.dumps({"case": case.name, **arrivals.summary()}), flush=True)
        if case.adapters:
            base = network.unload()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
