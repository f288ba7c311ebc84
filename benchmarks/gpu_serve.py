"""The served application on a GPU, through HTTP, beside its engine alone: `python -m benchmarks.gpu_serve --tokenizer FOLDER --out FILE`

64 streams of 128 tokens on the model that llama_8b.py makes, which has no tokenizer of its own: FOLDER has one with fewer tokens.
"""

import argparse
import asyncio
import json
import os
import shutil
import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.adapters_server import Served, cluster, serving
from benchmarks.gpu_decode import Bench, page_bytes
from benchmarks.http_cost import NUM_STREAMS, NUM_TOKENS, load
from benchmarks.llama_8b import NUM_PROMPT, POOL_PAGES, Case, make

SAMPLE_S = 0.1
NUM_RUNS = 3


class Utilisation:
    """The share of each sixth of a second in which a kernel ran, as the driver counts it."""

    def __init__(self) -> None:
        self.samples: list[float] = []
        self._is_over = threading.Event()

    @contextmanager
    def watched(self) -> Iterator[None]:
        thread = threading.Thread(target=self._run, daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._is_over.set()
            thread.join()

    def _run(self) -> None:
        command = ["nvidia-smi", "--query-gpu=utilization.gpu", "--format=csv,noheader,nounits"]
        while not self._is_over.wait(SAMPLE_S):
            self.samples.append(float(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[0]) / 100)


def through_http(model: Path) -> dict[str, Any]:
    with cluster() as url, serving(Served(model, "cuda", "auto")):
        asyncio.run(load(url, "native", str(model), "Warm up"))
        utilisation = Utilisation()
        with utilisation.watched():
            runs = [asyncio.run(load(url, "native", str(model), f"Run {run}")) for run in range(NUM_RUNS)]
    best = max(runs, key=lambda run: run["tokens_per_s"])
    return {**best, "gpu_idle_share": round(1 - statistics.mean(utilisation.samples), 3)}


def engine_alone(model: Path, adapters: Path) -> float:
    """Tokens a second of as many rows, prompts included."""
    bench = Bench(model, adapters, POOL_PAGES, page_bytes())
    names = Case(NUM_STREAMS, 0).names
    bench.generate(names, NUM_STREAMS, NUM_PROMPT, 8)
    seconds = min(bench.generate(names, NUM_STREAMS, 16, NUM_TOKENS) for _ in range(NUM_RUNS))
    bench.stop()
    return NUM_STREAMS * NUM_TOKENS / seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm/loray"))
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    os.environ["RAY_AUTH_MODE"] = "disabled"  # a cluster of its own that nothing outside this machine can reach
    model, adapters = make(options.folder)
    for file in options.tokenizer.glob("*token*"):
        shutil.copy(file, model)
    with tempfile.TemporaryDirectory() as cache:
        os.environ["XDG_CACHE_HOME"] = cache
        started = time.monotonic()
        http = through_http(model)
        print(json.dumps(http), f"{time.monotonic() - started:.0f} s", flush=True)
        alone = engine_alone(model, adapters)
    report = {"streams": NUM_STREAMS, "tokens": NUM_TOKENS, "http": http, "engine_tokens_per_s": round(alone)}
    report["http / engine"] = round(http["tokens_per_s"] / alone, 3)
    options.out.write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
