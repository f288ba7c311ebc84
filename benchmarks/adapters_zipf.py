"""A thousand adapters of Zipf's popularity through small tiers, beside the same requests over eight adapters that stay in the pool.

Both once more with room for all of the requests' adapters in the pool: what is between those two is the cost of more adapters in a step,
the rest of what is between the first two is the cost of loading.
"""

import itertools
import random
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from benchmarks.adapters_check import check_tokens
from benchmarks.adapters_server import Served, cluster_processes, serving, watching
from benchmarks.adapters_traffic import Answer, Client, Wish, first_tokens, gaps, measured, outcomes, quantiles
from benchmarks.adapters_zoo import Zoo
from benchmarks.memory_watch import MemoryWatch

RANKS = (16, 8, 32, 4, 64)  # by popularity, over and over; the middle first, so that the mean request has about the mean rank
STAYING_RANKS = (4, 8, 8, 16, 16, 32, 32, 64)
NUM_IN_POOL, NUM_IN_HOST, NUM_CLIENTS = 16, 100, 16
NUM_PROMPT = 20
WARM_UP = 1_000_000  # numbers from here on are prompts of no measured request
POOL_MEMORY_SHARE = 0.4  # of what is free, that a pool for all may take
COUNTERS = (
    "adapter_loads_host_total",
    "adapter_load_host_seconds_total",
    "adapter_loads_gpu_total",
    "adapter_load_gpu_seconds_total",
    "adapter_evictions_gpu_total",
    "adapter_evictions_host_total",
    "preemptions_total",
    "prefix_cached_tokens_total",
    "steps_total",
)


def num_new(number: int) -> int:
    """Of a request's answer: 16 to 48, 32 on average. Were all as long, they would end and begin at once where nothing is loaded, and steps
    with prompts, which take longer, would be few there alone."""
    return 16 + 37 * number % 33


@dataclass(frozen=True)
class Tiers:
    """Bytes that an adapter takes, by its rank."""

    pool: dict[int, int]
    host: dict[int, int]

    @property
    def args(self) -> dict[str, int]:
        """Room for so many adapters of the mean rank; host memory holds at least the largest while it is read, as large as its pages."""
        mean_pool, mean_host = (sum(tier.values()) / len(RANKS) for tier in (self.pool, self.host))
        return {
            "gpu_bytes": round(NUM_IN_POOL * mean_pool),
            "host_bytes": max(round(NUM_IN_HOST * mean_host), 2 * max(self.pool.values())),
        }


class ZipfBench:
    def __init__(self, served: Served, url: str, root: Path, num_adapters: int, num_requests: int, check_s: float) -> None:
        self._served = served
        self._url = url
        self._root = root
        self._ranks = {f"zipf{i}": RANKS[i % len(RANKS)] for i in range(num_adapters)}
        self._staying = {f"stays{i}": rank for i, rank in enumerate(STAYING_RANKS)}
        self._num_requests = num_requests
        self._check_s = check_s
        self._outputs: dict[str, dict[int, list[int]]] = {}  # of the two runs over all adapters: token ids by the number of the request
        self._wishes = self._zipf_wishes(num_requests, first=0)

    def run(self) -> dict[str, Any]:
        self._make_adapters()
        with serving(self._served, adapters={"local_roots": [self._root]}):
            tiers = measured(self._url, self._weigh)
        with serving(self._served, adapters={"local_roots": [self._root], **tiers.args}):
            report: dict[str, Any] = measured(self._url, self._small_tiers)
        report["all in the pool"] = self._large_pool(tiers)
        report["tokens"] = self._check()
        return {"adapters": len(self._ranks), **self._traffic(), **tiers.args, **report}

    def _make_adapters(self) -> None:
        zoo = Zoo(self._served.model, self._root)
        started = time.perf_counter()
        for name, rank in (self._ranks | self._staying).items():
            zoo.add(name, rank)
        print(f"  {len(self._ranks)} adapters written in {time.perf_counter() - started:.0f} s", flush=True)

    def _zipf_wishes(self, count: int, first: int) -> list[Wish]:
        """Adapter k is asked for in proportion to 1/k."""
        weights = [1 / (i + 1) for i in range(len(self._ranks))]
        names = random.Random(first).choices(list(self._ranks), weights, k=count)
        return [Wish(first + i, name, NUM_PROMPT, num_new(first + i)) for i, name in enumerate(names)]

    def _staying_wishes(self, wishes: Iterable[Wish]) -> list[Wish]:
        """The same requests, each over one of the eight adapters that has the same rank, those of a rank in turn."""
        turns = {rank: itertools.cycle([n for n, r in self._staying.items() if r == rank]) for rank in RANKS}
        return [Wish(wish.number, next(turns[self._ranks[wish.adapter_id]]), NUM_PROMPT, wish.num_new) for wish in wishes]

    def _traffic(self) -> dict[str, Any]:
        names = [wish.adapter_id for wish in self._wishes]
        return {
            "clients": NUM_CLIENTS,
            "prompt_tokens": NUM_PROMPT,
            "new_tokens": "16 to 48",
            "distinct_adapters": len(set(names)),
            "mean_rank_of_requests": round(sum(self._ranks[name] for name in names) / len(names), 1),
        }

    async def _weigh(self, client: Client) -> Tiers:
        """One adapter of each rank tells what such a one takes."""
        names = list(self._ranks)[: len(RANKS)]
        await client.closed_loop([Wish(WARM_UP + i, name, NUM_PROMPT, 1) for i, name in enumerate(names)], 1)
        known = await client.adapters()
        return Tiers(
            {self._ranks[name]: known[name]["gpu_bytes"] for name in names},
            {self._ranks[name]: known[name]["host_bytes"] for name in names},
        )

    async def _small_tiers(self, client: Client) -> dict[str, Any]:
        """The eight before and after, so that a machine that gets slower or faster does so to both."""
        half = len(self._wishes) // 2
        warm_up = self._zipf_wishes(max(NUM_CLIENTS, self._num_requests // 8), first=WARM_UP)
        staying = self._staying_wishes(self._wishes)
        await client.closed_loop([Wish(2 * WARM_UP + i, name, NUM_PROMPT, 1) for i, name in enumerate(self._staying)], 1)
        await client.closed_loop(self._staying_wishes(warm_up), NUM_CLIENTS)
        before = await _timed(client, staying[:half])
        watch = MemoryWatch(cluster_processes)
        async with watching(watch, client.stats):
            await client.closed_loop(warm_up, NUM_CLIENTS)
            zipf = await self._zipf(client, "small tiers")
        await client.closed_loop([Wish(3 * WARM_UP + i, name, NUM_PROMPT, 1) for i, name in enumerate(self._staying)], 1)
        after = await _timed(client, staying[half:])
        return {"zipf": zipf, "eight, before": before, "eight, after": after, "memory": watch.summary()}

    async def _zipf(self, client: Client, label: str) -> dict[str, Any]:
        answers: list[Answer] = []
        report = await _timed(client, self._wishes, answers)
        self._outputs[label] = {answer.wish.number: answer.token_ids for answer in answers}
        return report

    def _check(self) -> dict[str, Any]:
        """In bfloat16 the neighbours in a batch may change a token; only float32 is exact enough to compare."""
        if not self._served.is_float32:
            return {"left_out": "the model is not in float32"}
        small, large = self._outputs["small tiers"], self._outputs.get("large pool", {})
        equal = sum(small[number] == token_ids for number, token_ids in large.items())
        checked = check_tokens(self._served, self._root, self._wishes, small, self._check_s)
        return {"requests": len(small), "equal to those with all in the pool": equal, **checked}

    def _large_pool(self, tiers: Tiers) -> dict[str, Any]:
        names = list(dict.fromkeys(wish.adapter_id for wish in self._wishes))
        names += self._staying
        num_bytes = sum(tiers.pool[(self._ranks | self._staying)[name]] for name in names)
        if num_bytes > POOL_MEMORY_SHARE * psutil.virtual_memory().available:
            return {"left_out": f"a pool for {len(names)} adapters would take {num_bytes} bytes"}

        async def work(client: Client) -> dict[str, Any]:
            await client.closed_loop([Wish(WARM_UP + i, name, NUM_PROMPT, 1) for i, name in enumerate(names)], NUM_CLIENTS)
            eight = await _timed(client, self._staying_wishes(self._wishes)[: len(self._wishes) // 2])
            return {"eight": eight, "zipf": await self._zipf(client, "large pool")}

        with serving(self._served, adapters={"local_roots": [self._root], "gpu_bytes": num_bytes}):
            return dict(measured(self._url, work))


async def _timed(client: Client, wishes: list[Wish], into: list[Answer] | None = None) -> dict[str, Any]:
    before = await client.stats()
    started = time.perf_counter()
    answers = await client.closed_loop(wishes, NUM_CLIENTS)
    seconds = time.perf_counter() - started
    if into is not None:
        into += answers
    after = await client.stats()
    counted = {name: round(after[name] - before[name], 2) for name in COUNTERS}
    print(f"  {len(answers)} requests in {seconds:.0f} s, {seconds / max(counted['steps_total'], 1) * 1000:.1f} ms a step", flush=True)
    return {**outcomes(answers), **_speed(answers, seconds), **_loads(counted, seconds)}


def _speed(answers: list[Answer], seconds: float) -> dict[str, Any]:
    num_tokens = sum(len(answer.times) for answer in answers)
    return {
        "seconds": round(seconds, 1),
        "tokens": num_tokens,
        "tokens_per_s": round(num_tokens / seconds, 1),
        **first_tokens(answers),
        "itl": quantiles(gaps(answers)),
    }


def _loads(counted: dict[str, float], seconds: float) -> dict[str, Any]:
    """Readers work beside the steps and beside each other: their seconds are no part of the run's, only comparable."""
    num_loads = counted["adapter_loads_host_total"]
    return {
        "pool_load_ms_mean": round(1000 * counted["adapter_load_gpu_seconds_total"] / max(counted["adapter_loads_gpu_total"], 1), 1),
        "pool_load_share": round(counted["adapter_load_gpu_seconds_total"] / seconds, 3),
        "host_load_ms_mean": round(1000 * counted["adapter_load_host_seconds_total"] / num_loads, 1) if num_loads else 0.0,
        "host_load_seconds_per_second": round(counted["adapter_load_host_seconds_total"] / seconds, 3),
        "step_ms_mean": round(1000 * seconds / counted["steps_total"], 1) if counted["steps_total"] else 0.0,
        "counters": counted,
    }


def ratios(report: dict[str, Any]) -> dict[str, float]:
    eight = [report["eight, before"], report["eight, after"]]
    rate = sum(one["tokens"] for one in eight) / sum(one["seconds"] for one in eight)
    found = {"zipf: tokens/s / eight that stay": report["zipf"]["tokens_per_s"] / rate}
    if (large := report["all in the pool"]).get("zipf"):
        apart = large["zipf"]["tokens_per_s"] / large["eight"]["tokens_per_s"]
        found["zipf: the same with all in the pool"] = apart
        found["zipf: cost of loading, first / second"] = found["zipf: tokens/s / eight that stay"] / apart
    return found
