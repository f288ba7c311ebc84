"""vLLM on the same workload, run with the Python of vLLM's own environment: `python benchmarks/peer_vllm.py MODEL ADAPTERS`."""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")

from benchmarks.workload import ADAPTER_SETS, CASES, NEW_TOKENS, Arrivals


def run(engine: Any, prompts: list[str], loras: list[Any], params: Any) -> Arrivals:
    """As LLM.generate does it, with a look at the clock after each step."""
    arrivals = Arrivals(time.perf_counter(), [[] for _ in prompts])
    for number, (prompt, lora) in enumerate(zip(prompts, loras, strict=True)):
        engine.add_request(str(number), prompt, params, lora_request=lora)
    while engine.has_unfinished_requests():
        for output in engine.step():
            times = arrivals.times[int(output.request_id.partition("-")[0])]
            times += [time.perf_counter()] * (len(output.outputs[0].token_ids) - len(times))
    return arrivals


def main(model: Path, adapters: Path) -> None:
    import vllm
    from vllm.lora.request import LoRARequest

    for rank in (16, 64):  # slots are padded to the largest rank allowed, so a set of r16 gets a server of r16
        sets = [name for name, ranks in ADAPTER_SETS.items() if max(ranks) == rank]
        cases = [case for case in CASES if case.adapters in sets or (not case.adapters and rank == 16)]
        engine = vllm.LLM(
            str(model),
            dtype="float32",
            enable_lora=True,
            max_lora_rank=rank,
            max_loras=8,
            max_model_len=1024,
            max_num_seqs=32,
            enforce_eager=True,
        )
        for case in cases:
            names = {name: i + 1 for i, name in enumerate(sorted(set(case.adapter_names)))}
            loras = [LoRARequest(name, names[name], str(adapters / name)) if name else None for name in case.adapter_names]
            greedy = vllm.SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
            warm_up = vllm.SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
            engine.generate(case.prompts, warm_up, lora_request=loras, use_tqdm=False)
            arrivals = run(engine.llm_engine, case.prompts, loras, greedy)
            print(json.dumps({"case": case.name, **arrivals.summary(), "version": vllm.__version__}), flush=True)
        del engine


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
