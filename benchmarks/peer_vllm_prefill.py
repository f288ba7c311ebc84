"""vLLM's time for 8,192 tokens of prompts, as gpu_decode.py measures loray's: `python -m benchmarks.peer_vllm_prefill ADAPTERS OUT`

ADAPTERS is the folder that llama_8b.py made; without one vLLM runs without LoRA. vLLM makes up the weights itself.
"""

import json
import sys
import time
from pathlib import Path

from benchmarks.gpu_decode import PREFILL_ROWS, PREFILL_TOKENS
from benchmarks.llama_8b import CONFIG, Case

NUM_LORAS = 8


def main(adapters: Path | None, out: Path) -> None:
    import vllm
    from vllm.lora.request import LoRARequest

    model = out.with_suffix(".model")
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text(json.dumps(CONFIG))
    lora = {"enable_lora": True, "max_loras": NUM_LORAS, "max_lora_rank": 16} if adapters else {}
    engine = vllm.LLM(
        str(model),
        skip_tokenizer_init=True,
        load_format="dummy",
        dtype="bfloat16",
        max_model_len=PREFILL_TOKENS + 16,
        max_num_seqs=32,
        gpu_memory_utilization=0.85,
        enable_prefix_caching=False,
        **lora,
    )
    one_token = vllm.SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, detokenize=False)

    def seconds(num_rows: int, num_adapters: int) -> float:
        size = PREFILL_TOKENS // num_rows
        prompts = [{"prompt_token_ids": [(7 * row + token) % 30000 + 100 for token in range(size)]} for row in range(num_rows)]
        names = Case(num_rows, num_adapters).names
        loras = [LoRARequest(name, 1 + i, str(adapters / name)) for i, name in enumerate(names)] if adapters and names else None
        started = time.perf_counter()
        engine.generate(prompts, one_token, lora_request=loras, use_tqdm=False)
        return time.perf_counter() - started

    results = []
    for rows in PREFILL_ROWS:
        for count in (0, rows) if adapters else (0,):
            milliseconds = 1000 * min(seconds(rows, count) for _ in range(10))
            results.append({"lora": bool(adapters), "prefill_rows": rows, "adapters": count, "ms": round(milliseconds, 1)})
            print(json.dumps(results[-1]), flush=True)
    out.write_text(json.dumps(results))


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 2 else None, Path(sys.argv[-1]))
