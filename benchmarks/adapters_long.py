"""Each of a thousand adapters once through small tiers, then minutes of Zipf traffic: are all served right, is memory flat."""

import itertools
import random
import time
from pathlib import Path
from typing import Any

from benchmarks.adapters_check import check_tokens
from benchmarks.adapters_server import Served, cluster_processes, serving, watching
from benchmarks.adapters_traffic import Answer, Client, Wish, measured, outcomes
from benchmarks.adapters_zipf import NUM_CLIENTS, NUM_PROMPT, ZipfBench, num_new
from benchmarks.memory_watch import MemoryWatch

NUM_AT_ONCE = 200  # requests between two looks at the clock
KV_BYTES = "64MiB"  # filled within the first minutes, so that what a full cache takes is seen


class LongBench(ZipfBench):
    def __init__(self, served: Served, url: str, root: Path, num_adapters: int, seconds: float, check_s: float) -> None:
        super().__init__(served, url, root, num_adapters, num_requests=NUM_AT_ONCE, check_s=check_s)
        self._seconds = seconds
        self._every = [Wish(i, name, NUM_PROMPT, num_new(i)) for i, name in enumerate(self._ranks)]
        random.Random(0).shuffle(self._every)

    def run(self) -> dict[str, Any]:
        self._make_adapters()
        with serving(self._served, adapters={"local_roots": [self._root]}):
            tiers = measured(self._url, self._weigh)
        with serving(self._served, adapters={"local_roots": [self._root], **tiers.args}, kv_cache={"cpu_bytes": KV_BYTES}):
            report: dict[str, Any] = measured(self._url, self._long)
        tokens = check_tokens(self._served, self._root, self._every, self._outputs["every"], self._check_s)
        return {"adapters": len(self._ranks), **tiers.args, **report, "tokens": tokens}

    async def _long(self, client: Client) -> dict[str, Any]:
        watch, failed, num_later = MemoryWatch(cluster_processes), list[Answer](), 0
        started = time.monotonic()
        async with watching(watch, client.stats):
            every = await client.closed_loop(self._every, NUM_CLIENTS)
            self._outputs["every"] = {answer.wish.number: answer.token_ids for answer in every}
            for turn in itertools.count(1):
                if time.monotonic() - started > self._seconds:
                    break
                later = await client.closed_loop(self._zipf_wishes(NUM_AT_ONCE, first=turn * len(self._every)), NUM_CLIENTS)
                num_later += len(later)
                failed += [answer for answer in later if not answer.is_ok]
                print(f"  {num_later} requests after each once, {time.monotonic() - started:.0f} s", flush=True)
        return {"each once": outcomes(every), "then": {"requests": num_later, "failed": len(failed)}, "memory": watch.summary()}
