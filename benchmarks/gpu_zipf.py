"""256 adapters of Zipf's popularity through a pool for 32, beside 32 that stay: `python -m benchmarks.gpu_zipf --out FILE`

Llama-3.1-8B's shape, engine and rank process without Ray, 32 requests at a time, all adapters in host memory. The memory of both processes
is looked at between the runs, for a look at so much pinned memory takes long; `--rounds` adds such runs, for those who look for a leak.
"""

import argparse
import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from benchmarks.engine_load import Load
from benchmarks.gpu_decode import Bench, page_bytes
from benchmarks.llama_8b import make
from benchmarks.memory_watch import MemoryWatch

NUM_ADAPTERS, NUM_STAYING, NUM_CLIENTS = 256, 32, 32
PAGES_OF_ADAPTER = 2  # rank 16
NUM_REQUESTS, NUM_NEW = 512, 128


def spread(adapters: Path) -> list[str]:
    """Names of so many folders, each with the file of one of the 32: what is in them does not matter, that they are apart does."""
    names = [f"zipf-{i}" for i in range(NUM_ADAPTERS)]
    for i, name in enumerate(names):
        folder, source = adapters / name, adapters / f"r16-{i % NUM_STAYING}"
        if not folder.exists():
            folder.mkdir()
            for file in source.iterdir():
                os.link(file, folder / file.name)
    return names


def watched(bench: Bench) -> tuple[MemoryWatch, Callable[[], None]]:
    """And what takes a sample."""
    processes = [(psutil.Process(), "engine"), *((psutil.Process(pid), "rank") for pid in bench.group.pids)]
    watch = MemoryWatch(lambda: processes)
    return watch, lambda: watch.sample(bench.engine.stats())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm/loray"))
    parser.add_argument("--rounds", type=int, default=0, help="more runs of the Zipf traffic, of which only the memory is told")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    model, adapters = make(options.folder)
    names = spread(adapters)
    bench = Bench(model, adapters, NUM_STAYING * PAGES_OF_ADAPTER, page_bytes())
    load = Load(bench)
    watch, sample = watched(bench)
    sample()
    print("read into host memory:", json.dumps(load.run(names, num_clients=8, num_new=2)), flush=True)
    staying = random.Random(0).choices(names[:NUM_STAYING], k=NUM_REQUESTS)
    zipf = random.Random(1).choices(names, [1 / (i + 1) for i in range(NUM_ADAPTERS)], k=NUM_REQUESTS)
    sample()
    load.run(staying, NUM_CLIENTS, NUM_NEW)
    report: dict[str, Any] = {}
    for label, wanted in (("staying", staying), ("zipf", zipf), ("staying, again", staying)):
        sample()
        report[label] = load.run(wanted, NUM_CLIENTS, NUM_NEW)
        print(label, json.dumps(report[label]), flush=True)
    for _ in range(options.rounds):
        sample()
        load.run(zipf, NUM_CLIENTS, NUM_NEW)
    sample()
    best = max(report["staying"], report["staying, again"], key=lambda run: run["tokens_per_s"])
    report["zipf / staying, tokens per second"] = round(report["zipf"]["tokens_per_s"] / best["tokens_per_s"], 3)
    report["zipf / staying, p50 of the first token"] = round(report["zipf"]["ttft_p50_ms"] / best["ttft_p50_ms"], 3)
    report["memory"] = watch.summary()
    options.out.write_text(json.dumps(report, indent=2) + "\n")
    bench.stop()


if __name__ == "__main__":
    main()
