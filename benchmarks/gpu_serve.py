"""The served application on a GPU, through HTTP, beside its engine alone: `python -m benchmarks.gpu_serve --out FILE`

64 clients, each with one streamed request after another, on the model that llama_8b.py makes. Answers differ in length, so that on
neither side they all end at once. Behind Serve's own proxy, one Python process for a node; with RAY_SERVE_ENABLE_HA_PROXY=1 behind HAProxy.
"""

import argparse
import asyncio
import itertools
import json
import os
import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import aiohttp
from ray import serve

from benchmarks.adapters_server import APP, Served, cluster, serving
from benchmarks.engine_load import Load, answer_tokens
from benchmarks.environment import environment
from benchmarks.gpu_decode import Bench, page_bytes
from benchmarks.llama_8b import NUM_PROMPT, POOL_PAGES, make
from loray.deployments.config import ServerArgs

SAMPLE_S = 0.1
NUM_STREAMS, NUM_REQUESTS = 64, 512
NUM_RUNS = 3
MAX_INGRESSES = 4  # of which each has an interpreter's lock of its own
SETTLE_S = 90.0  # of traffic until Serve has as many ingresses as it wants: it looks back for 30 s, waits for 30 s, and starts them


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


async def clients(url: str, num_requests: int, run: str) -> float:
    """Tokens a second of so many streamed requests, 64 at a time."""
    numbers = iter(range(num_requests))

    async def client(session: aiohttp.ClientSession) -> None:
        for number in numbers:
            prompt = f"{run}.{number}. ".ljust(NUM_PROMPT, "x")  # a token for each byte: no two have their first block in common
            body = {"inputs": prompt, "parameters": {"max_new_tokens": answer_tokens(number), "ignore_eos_token": True}}
            async with session.post(f"{url}/generate_stream", json=body) as response:
                answer = await response.read()
                assert response.status == 200 and answer.count(b'"token":') == answer_tokens(number), answer[-500:]

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=300)) as session:
        started = time.perf_counter()
        await asyncio.gather(*(client(session) for _ in range(NUM_STREAMS)))
        return sum(map(answer_tokens, range(num_requests))) / (time.perf_counter() - started)


def through_http(model: Path, min_ingresses: int) -> dict[str, Any]:
    ingress, started = {"min_replicas": min_ingresses, "max_replicas": MAX_INGRESSES}, time.perf_counter()
    with ExitStack() as running:
        url = running.enter_context(cluster())
        cluster_s = time.perf_counter() - started
        running.enter_context(serving(Served(model, "cuda", "auto"), ingress=ingress))
        ready_s = time.perf_counter() - started
        _warm_up(url, SETTLE_S if min_ingresses < MAX_INGRESSES else 0.0)
        num_ingresses = serve.status().applications[APP].deployments["Ingress"].replica_states["RUNNING"]
        utilisation = Utilisation()
        with utilisation.watched():
            rates = [asyncio.run(clients(url, NUM_REQUESTS, str(run))) for run in range(NUM_RUNS)]
    idle = round(1 - statistics.mean(utilisation.samples), 3)
    return {
        "start_to_ready_s": round(ready_s, 1),
        "of_which_ray_and_serve_s": round(cluster_s, 1),
        "ingresses_when_measured": num_ingresses,
        "http_tokens_per_s": round(statistics.median(rates)),
        "http_tokens_per_s_of_all_runs": [round(rate) for rate in rates],
        "gpu_idle_share": idle,
    }


def _warm_up(url: str, seconds: float) -> None:
    until = time.perf_counter() + seconds
    for number in itertools.count():
        asyncio.run(clients(url, NUM_STREAMS, f"w{number}"))
        if time.perf_counter() >= until:
            return


def engine_alone(model: Path, adapters: Path) -> dict[str, Any]:
    defaults = ServerArgs.model_validate({"model": {"id": str(model)}})  # as the application has them
    bench = Bench(model, adapters, POOL_PAGES, page_bytes(), "cuda", defaults.scheduler.max_batch_tokens, defaults.model.max_total_tokens)
    load = Load(bench)
    load.run([""] * NUM_STREAMS, NUM_STREAMS, answer_tokens)
    rates = [load.run([""] * NUM_REQUESTS, NUM_STREAMS, answer_tokens)["tokens_per_s"] for _ in range(NUM_RUNS)]
    bench.stop()
    return {"engine_tokens_per_s": statistics.median(rates), "engine_tokens_per_s_of_all_runs": rates}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm/loray"))
    parser.add_argument("--min-ingresses", type=int, default=MAX_INGRESSES, help="1: as serve_config.yaml has it, more as they are needed")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    os.environ["RAY_AUTH_MODE"] = "disabled"  # a cluster of its own that nothing outside this machine can reach
    model, adapters = make(options.folder)
    with tempfile.TemporaryDirectory() as cache:
        os.environ["XDG_CACHE_HOME"] = cache
        proxy = "haproxy" if os.environ.get("RAY_SERVE_ENABLE_HA_PROXY") == "1" else "serve"
        report = environment(f"python -m benchmarks.gpu_serve --min-ingresses {options.min_ingresses} --out FILE")
        ingresses = f"{options.min_ingresses} to {MAX_INGRESSES}"
        report |= {"streams": NUM_STREAMS, "tokens": "64 to 192", "requests": NUM_REQUESTS, "proxy": proxy, "ingresses": ingresses}
        report |= through_http(model, options.min_ingresses)
        print(json.dumps(report), flush=True)
        report |= engine_alone(model, adapters)
    report["http / engine"] = round(report["http_tokens_per_s"] / report["engine_tokens_per_s"], 3)
    options.out.write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
