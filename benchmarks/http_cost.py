"""`make bench-http`: what a streamed token costs in the ingress, the driver and the proxy, into benchmarks/results/http.json.

The whole server with a model so small that its rank costs next to nothing, once behind each of Serve's two proxies.
"""

import argparse
import asyncio
import datetime
import json
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import psutil
from ray import serve

from benchmarks import random_model
from benchmarks.adapters_server import APP, Served, cluster, serving
from benchmarks.cpu import HERE, machine, measure
from loray.models.checkpoint import resolve_model

RESULTS = HERE / "results" / "http.json"
PROXIES = {"serve": [], "haproxy": ["RAY_SERVE_ENABLE_HA_PROXY=1", "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S=1"]}
TITLES = {"ray::ServeReplica:loray:Ingress": "ingress", "ray::ServeReplica:loray:Driver": "driver", "ray::Proxy": "proxy"}
TITLES |= {"ray::HAProxy": "proxy", "haproxy": "proxy", "ray::Rank": "rank"}
FIELDS = ["hidden_size=48", "intermediate_size=96", "num_hidden_layers=1", "num_attention_heads=3", "num_key_value_heads=1"]
NUM_STREAMS = 64
NUM_TOKENS = 128  # of each stream
NUM_RUNS = 4  # of which the cheapest counts: others on the machine can only add
TARGET_MS = 0.35  # ingress and driver together, behind the proxy that Serve ships
PROMPT = "Tell me a story about number {}."


def bodies(case: str, run: str) -> tuple[str, list[dict[str, Any]]]:
    """The route, and a body for each stream. No two runs share a prompt, so that none is in the prefix cache."""
    prompts = [f"{run}. {PROMPT.format(i)}" for i in range(NUM_STREAMS)]
    if case == "native":
        parameters = {"max_new_tokens": NUM_TOKENS, "ignore_eos_token": True}
        return "/generate_stream", [{"inputs": prompt, "parameters": parameters} for prompt in prompts]
    common = {"model": "tiny", "max_tokens": NUM_TOKENS, "ignore_eos": True, "stream": True, "temperature": 0}
    return "/v1/chat/completions", [{**common, "messages": [{"role": "user", "content": prompt}]} for prompt in prompts]


class Stream:
    """What one client sees: when bytes came, and how many reads they took."""

    def __init__(self) -> None:
        self.times: list[float] = []  # of each read
        self.first = 0.0

    async def run(self, session: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> None:
        async with session.post(url, json=body) as response:
            assert response.status == 200, await response.text()
            async for _ in response.content.iter_any():
                self.times.append(time.perf_counter())


async def load(url: str, case: str, run: str) -> dict[str, Any]:
    route, requests = bodies(case, run)
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
    """User and system time so far, by role."""
    found: Counter[str] = Counter()
    for process in psutil.process_iter():
        try:
            title = (process.cmdline() or [""])[0].rpartition("/")[2]
            role = next((role for start, role in TITLES.items() if title.startswith(start)), "")
            if role:
                times = process.cpu_times()
                found[role] += times.user + times.system
        except psutil.Error:  # it has ended meanwhile
            continue
    return found
