"""Keys and values, and weights, in float8 beside bfloat16 on a GPU: `python -m benchmarks.gpu_float8 --out FILE`

Llama-3.1-8B's shape with random weights, one rank in this process. Milliseconds a decode step, the tokens that a GiB of the cache holds,
and how far the log-probabilities of the tokens of a prompt are from those in bfloat16, beside how far those are from each other.
"""

import argparse
import gc
import json
import random
import statistics
from pathlib import Path
from typing import Any

import torch

from benchmarks.environment import environment
from benchmarks.gpu_profile import BLOCK, Decoding, step_ms
from benchmarks.llama_8b import VOCABULARY, Case
from loray.models.step import Admission, Row, Sampling, Step

KINDS: dict[str, dict[str, bool]] = {
    "bfloat16": {},
    "cache in float8": {"has_float8_cache": True},
    "weights in float8": {"has_float8_weights": True},
    "both in float8": {"has_float8_cache": True, "has_float8_weights": True},
}
ROWS = (8, 32, 128)
NUM_SCORED = 1024
GIB = 2**30


def prompt_logprobs(decoding: Decoding) -> list[float]:
    """In two chunks: the second reads keys and values of the first from the cache."""
    prompt = random.Random(0).choices(range(VOCABULARY), k=NUM_SCORED)
    half, num_blocks = NUM_SCORED // 2, NUM_SCORED // BLOCK
    admission = Admission(0, prompt, [], 0, [], Sampling(), wants_prompt_logprobs=True)
    blocks = list(range(num_blocks))
    decoding.runner.execute(Step(0, [], [admission], [Row(0, half, blocks[: num_blocks // 2], False)]))
    result = decoding.runner.execute(Step(0, [], [], [Row(0, half, blocks[num_blocks // 2 :], True)]))
    return result.prompt_logprobs[0]


def measure(folder: Path, flags: dict[str, bool]) -> tuple[dict[str, Any], list[float]]:
    decoding = Decoding(folder, max(ROWS), **flags)
    report = decoding.runner.report(0.5)
    found: dict[str, Any] = {
        "weights_gib": round(report.weight_bytes / GIB, 2),
        "cached_tokens_per_gib": GIB // report.block_bytes * BLOCK,
    }
    logprobs = prompt_logprobs(decoding)
    for rows in ROWS:
        for adapters in (0, 8):
            decoding.begin(Case(rows, adapters))
            found[f"{rows} rows, {adapters} adapters, ms a step"] = round(step_ms(decoding), 3)
    return found, logprobs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm/loray"))
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    results = environment("python -m benchmarks.gpu_float8 --out FILE") | {"scored_tokens": NUM_SCORED - 1}
    exact: list[float] = []
    for kind, flags in KINDS.items():
        results[kind], logprobs = measure(options.folder, flags)
        exact = exact or logprobs
        errors = [abs(found - expected) for found, expected in zip(logprobs, exact, strict=True)]
        results[kind] |= {"logprob_error_mean": round(statistics.mean(errors), 5), "logprob_error_max": round(max(errors), 5)}
        print(kind, json.dumps(results[kind]), flush=True)
        gc.collect()
        torch.cuda.empty_cache()
    results["logprobs_standard_deviation"] = round(statistics.pstdev(exact), 5)
    options.out.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
