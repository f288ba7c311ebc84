"""256 adapters of Zipf's popularity through a pool for 32, beside 32 that stay: `python -m benchmarks.gpu_zipf --out FILE`

Llama-3.1-8B's shape, engine and rank process without Ray, 32 requests at a time, all adapters in host memory, answers of 64
to 192 tokens. Then how long one takes from there into the pool, and what streams of adapters that stay see of others that are loaded
beside them. The memory of both processes is looked at between the runs, for a look at so much pinned memory takes long; `--rounds` adds
such runs, for those who look for a leak.
"""

import argparse
import itertools
import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from benchmarks.engine_load import Load, answer_tokens
from benchmarks.environment import environment
from benchmarks.gpu_decode import Bench, page_bytes
from benchmarks.llama_8b import make
from benchmarks.memory_watch import MemoryWatch
from loray.models.adapter import CONFIG_FILE, WEIGHTS_FILE

NUM_ADAPTERS, NUM_STAYING, NUM_CLIENTS = 256, 32, 32
PAGES_OF_ADAPTER = 2  # rank 16
NUM_REQUESTS, NUM_NEW = 512, 128
NUM_STREAMED, NUM_VISITED, NUM_VISITOR_NEW = 8, 24, 8  # beside_loads: adapters of the streams, and of the visitors where they stay too
VISITS = 4  # for each request of a stream


def spread(adapters: Path) -> list[str]:
    """Names of so many folders, each with the weights of one of the 32 and a configuration of its own, which makes it another adapter."""
    names = [f"zipf-{i}" for i in range(NUM_ADAPTERS)]
    for i, name in enumerate(names):
        folder, source = adapters / name, adapters / f"r16-{i % NUM_STAYING}"
        if not folder.exists():
            folder.mkdir()
            os.link(source / WEIGHTS_FILE, folder / WEIGHTS_FILE)
            config = json.loads((source / CONFIG_FILE).read_text())
            (folder / CONFIG_FILE).write_text(json.dumps(config | {"revision": name}))
    return names


def load_ms(bench: Bench, load: Load, names: list[str]) -> float:
    """Of one adapter that lies in host memory and not in the pool, into the pool, on average."""

    def loaded() -> tuple[float, float]:
        stats = bench.engine.stats()
        return stats["adapter_loads_gpu_total"], stats["adapter_load_gpu_seconds_total"]

    num_before, seconds_before = loaded()
    load.run(names, num_clients=1, num_new=2)
    num_after, seconds_after = loaded()
    assert num_after - num_before == len(names)
    return round(1000 * (seconds_after - seconds_before) / len(names), 2)


def beside_loads(load: Load, names: list[str], visitors: list[str]) -> dict[str, Any]:
    """What streams see while others ask for each of the visitors once in a while. No prompt is longer than a token: a long one would hold
    up the streams for longer than a load does, and hide it."""
    streamed, turn = names[:NUM_STREAMED], itertools.cycle(visitors)
    wanted = [name for stream in streamed * NUM_STREAMED for name in (stream, *itertools.islice(turn, VISITS))]
    num_new: Callable[[int], int] = lambda number: NUM_VISITOR_NEW if number % (VISITS + 1) else NUM_NEW  # noqa: E731
    return load.run(wanted, NUM_CLIENTS // 2, num_new, only=streamed, num_prompt=1)


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
    assert bench.engine.stats()["adapters_in_host"] == NUM_ADAPTERS
    staying = random.Random(0).choices(names[:NUM_STAYING], k=NUM_REQUESTS)
    zipf = random.Random(1).choices(names, [1 / (i + 1) for i in range(NUM_ADAPTERS)], k=NUM_REQUESTS)
    sample()
    load.run(staying, NUM_CLIENTS, answer_tokens)
    report = environment("python -m benchmarks.gpu_zipf --out FILE")
    for label, wanted in (("staying", staying), ("zipf", zipf), ("staying, again", staying)):
        sample()
        num_before = bench.engine.stats()["adapter_loads_gpu_total"]
        report[label] = load.run(wanted, NUM_CLIENTS, answer_tokens)
        report[label]["loads"] = bench.engine.stats()["adapter_loads_gpu_total"] - num_before
        print(label, json.dumps(report[label]), flush=True)
    runs: dict[str, list[dict[str, Any]]] = {}
    resident, others = names[NUM_STREAMED : NUM_STREAMED + NUM_VISITED], names[NUM_STAYING:]
    for label, visitors in (("beside visitors that stay", resident), ("beside visitors that are loaded", others)) * 2:
        run = beside_loads(load, names, visitors)
        runs.setdefault(label, []).append(run)
        report[label] = min(runs[label], key=lambda run: run["itl_p99_ms"]) | {
            "itl_p99_ms_of_all_runs": [run["itl_p99_ms"] for run in runs[label]]
        }
        print(label, json.dumps(run), flush=True)
    report["84 MB from host memory to the GPU, ms"] = load_ms(bench, load, names[-NUM_STAYING:])
    for _ in range(options.rounds):
        sample()
        load.run(zipf, NUM_CLIENTS, answer_tokens)
    sample()
    best = max(report["staying"], report["staying, again"], key=lambda run: run["tokens_per_s"])
    report["zipf / staying, tokens per second"] = round(report["zipf"]["tokens_per_s"] / best["tokens_per_s"], 3)
    report["zipf / staying, p50 of the first token"] = round(report["zipf"]["ttft_p50_ms"] / best["ttft_p50_ms"], 3)
    report["beside loads / without, p99 between tokens"] = round(
        report["beside visitors that are loaded"]["itl_p99_ms"] / report["beside visitors that stay"]["itl_p99_ms"], 3
    )
    report["memory"] = watch.summary()
    options.out.write_text(json.dumps(report, indent=2) + "\n")
    bench.stop()


if __name__ == "__main__":
    main()
