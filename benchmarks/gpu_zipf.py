"""256 adapters of Zipf's popularity through a pool for 32, beside 32 that stay: `python -m benchmarks.gpu_zipf --out FILE`

Llama-3.1-8B's shape, engine and rank process without Ray, 32 requests at a time, all adapters in host memory.
"""

import argparse
import itertools
import json
import os
import random
import statistics
import time
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from benchmarks.gpu_decode import Bench, page_bytes
from benchmarks.llama_8b import NUM_PROMPT, make
from loray.deployments.request import GenerationRequest, TokenEvent
from loray.models.step import Sampling

NUM_ADAPTERS, NUM_STAYING, NUM_CLIENTS = 256, 32, 32
PAGES_OF_ADAPTER = 2  # rank 16
NUM_REQUESTS, NUM_NEW = 512, 128


class Timed(NamedTuple):
    started: float
    times: list[float]  # of each token


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


class Load:
    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        self._num_sent = 0

    def run(self, names: list[str], num_clients: int = NUM_CLIENTS, num_new: int = NUM_NEW) -> dict[str, Any]:
        """A client sends its next request when it has the last token of the one before."""
        wanted = iter(names)
        started = time.perf_counter()
        timed: dict[str, Timed] = {}
        num_open = sum(self._send(name, num_new, timed) for name in itertools.islice(wanted, num_clients))
        while num_open:
            events = msgspec.msgpack.decode(self._bench.socket.recv(), type=list[TokenEvent])
            now = time.perf_counter()
            for event in events:
                assert not event.error, event.message
                timed[event.request_id].times.extend([now] * len(event.token_ids))
                if event.is_last:
                    num_open -= 1
                    num_open += sum(self._send(name, num_new, timed) for name in itertools.islice(wanted, 1))
        return _summary(list(timed.values()), time.perf_counter() - started)

    def _send(self, name: str, num_new: int, timed: dict[str, Timed]) -> int:
        self._num_sent += 1
        prompt = [(token + 1000 * self._num_sent) % 30000 + 100 for token in range(NUM_PROMPT)]
        request = GenerationRequest(
            request_id=str(self._num_sent), prompt_ids=prompt, max_new_tokens=num_new, sampling=Sampling(), ignore_eos=True
        )
        timed[request.request_id] = Timed(time.perf_counter(), [])
        self._bench.engine.submit(request, self._bench.files.find(name), self._bench.address, lambda ending: None)
        return 1


def _summary(timed: list[Timed], seconds: float) -> dict[str, Any]:
    first = [each.times[0] - each.started for each in timed]
    gaps = sorted(later - earlier for each in timed for earlier, later in itertools.pairwise(each.times))
    return {
        "tokens_per_s": round(sum(len(each.times) for each in timed) / seconds),
        "ttft_p50_ms": round(1000 * statistics.median(first), 1),
        "itl_p50_ms": round(1000 * statistics.median(gaps), 2),
        "itl_p99_ms": round(1000 * gaps[int(0.99 * len(gaps))], 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm/loray"))
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    model, adapters = make(options.folder)
    names = spread(adapters)
    bench = Bench(model, adapters, NUM_STAYING * PAGES_OF_ADAPTER, page_bytes())
    load = Load(bench)
    print("read into host memory:", json.dumps(load.run(names, num_clients=8, num_new=2)), flush=True)
    staying = random.Random(0).choices(names[:NUM_STAYING], k=NUM_REQUESTS)
    zipf = random.Random(1).choices(names, [1 / (i + 1) for i in range(NUM_ADAPTERS)], k=NUM_REQUESTS)
    load.run(staying)
    report: dict[str, Any] = {}
    for label, wanted in (("staying", staying), ("zipf", zipf), ("staying, again", staying)):
        report[label] = load.run(wanted)
        print(label, json.dumps(report[label]), flush=True)
    best = max(report["staying"], report["staying, again"], key=lambda run: run["tokens_per_s"])
    report["zipf / staying, tokens per second"] = round(report["zipf"]["tokens_per_s"] / best["tokens_per_s"], 3)
    report["zipf / staying, p50 of the first token"] = round(report["zipf"]["ttft_p50_ms"] / best["ttft_p50_ms"], 3)
    options.out.write_text(json.dumps(report, indent=2) + "\n")
    bench.stop()


if __name__ == "__main__":
    main()
