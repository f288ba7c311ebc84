"""The time between the tokens of eight streams: alone, beside ten adapters that load, and with a slow download beside those."""

import asyncio
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import Any

from benchmarks.adapters_server import Served, serving
from benchmarks.adapters_traffic import Answer, Client, Wish, gaps, measured, outcomes, quantiles
from benchmarks.adapters_zoo import Zoo

NUM_ADAPTER_STREAMS, NUM_BASE_STREAMS, NUM_OTHERS = 4, 4, 10
STREAM_RANK, OTHER_RANK, SLOW_RANK = 16, 16, 64
NUM_PROMPT, NUM_NEW = 20, 8
MAX_STREAM = 1500  # tokens; streams that outlast the measurement have no prompts in it
SETTLE_S = 2.0  # until all prompts of the streams are computed
SLOW_START_S = 3.0


class Phase(Enum):
    """Each with ten adapters of its own."""

    BEFORE = "ten that load, before"
    SLOW = "ten that load, and a slow download"
    AFTER = "ten that load, after"


Timed = tuple[float, Wish]  # seconds after the start


class DownloadBench:
    """slow_s is how long the slow download takes; what is measured lasts a little longer."""

    def __init__(self, served: Served, url: str, root: Path, slow_s: float) -> None:
        self._served = served
        self._url = url
        self._local, self._web = root / "local", root / "web"
        self._slow_s = slow_s
        self._seconds = SLOW_START_S + slow_s + SETTLE_S
        self._streams = [f"stream{i}" for i in range(NUM_ADAPTER_STREAMS)] + [""] * NUM_BASE_STREAMS

    def run(self) -> dict[str, Any]:
        local, web = Zoo(self._served.model, self._local), Zoo(self._served.model, self._web)
        for name in self._streams[:NUM_ADAPTER_STREAMS]:
            local.add(name, STREAM_RANK)
        web.add("slow", SLOW_RANK)
        for phase in Phase:
            for i in range(NUM_OTHERS):
                web.add(f"{phase.name}{i}", OTHER_RANK)
        with _file_server(self._web, "slow", self._slow_s) as files:
            adapters = {"local_roots": [self._local], "allowed_urls": [files]}
            with serving(self._served, adapters=adapters):
                report: dict[str, Any] = measured(self._url, lambda client: self._measure(client, files))
        return {"streams": len(self._streams), "slow_download_s": self._slow_s, **report}

    async def _measure(self, client: Client, files: str) -> dict[str, Any]:
        num_new = min(MAX_STREAM, (await client.info())["max_total_tokens"] - NUM_PROMPT)
        await client.closed_loop([Wish(i, name, NUM_PROMPT, 2) for i, name in enumerate(self._streams)], len(self._streams))
        slow = (SLOW_START_S, Wish(99, f"{files}/slow", NUM_PROMPT, NUM_NEW))
        report = {"alone": await self._phase(client, num_new, 1000, [])}
        for number, phase in enumerate(Phase, 2):
            others = self._spread([f"{files}/{phase.name}{i}" for i in range(NUM_OTHERS)])
            report[phase.value] = await self._phase(client, num_new, 1000 * number, [slow, *others] if phase is Phase.SLOW else others)
        return report

    def _spread(self, names: list[str]) -> list[Timed]:
        """Over the time of the slow download, one after another."""
        pause = 0.8 * self._slow_s / len(names)
        return [(SLOW_START_S + (i + 1) * pause, Wish(500 + i, name, NUM_PROMPT, NUM_NEW)) for i, name in enumerate(names)]

    async def _phase(self, client: Client, num_new: int, first_number: int, others: list[Timed]) -> dict[str, Any]:
        streamed: list[Answer] = []
        asked: list[Answer] = []
        started = time.perf_counter()

        async def stream(number: int, adapter_id: str) -> None:
            while True:  # a small model gets to the end sooner
                answer = await client.send(Wish(number, adapter_id, NUM_PROMPT, num_new), streamed)
                assert answer.is_ok, answer.error

        async def ask(delay: float, wish: Wish) -> None:
            await asyncio.sleep(delay)
            await client.send(wish, asked)

        streams = [asyncio.create_task(stream(first_number + i, name)) for i, name in enumerate(self._streams)]
        await asyncio.gather(asyncio.sleep(self._seconds), *(ask(*other) for other in others))
        assert not any(task.done() for task in streams), "every stream goes on"
        for task in streams:
            task.cancel()
        await asyncio.gather(*streams, return_exceptions=True)
        await client.wait_until_idle()
        return {
            "itl": quantiles(gaps(streamed, started + SETTLE_S, started + self._seconds)),
            "others": outcomes(asked),
            "others_ttft": quantiles([answer.ttft for answer in asked if answer.times and not answer.wish.adapter_id.endswith("/slow")]),
            "slow_ttft": quantiles([answer.ttft for answer in asked if answer.times and answer.wish.adapter_id.endswith("/slow")]),
        }


@contextmanager
def _file_server(folder: Path, slow_name: str, slow_s: float) -> Iterator[str]:
    command = [sys.executable, "-m", "benchmarks.adapters_slow_files", str(folder), slow_name, str(slow_s)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        try:
            yield f"http://127.0.0.1:{int(process.stdout.readline())}"
        finally:
            process.terminate()


def ratios(report: dict[str, Any]) -> dict[str, float]:
    before, slow, after = (report[phase.value]["itl"]["p99_ms"] for phase in Phase)
    return {
        "download: ITL p99 with / without, the better of two": slow / min(before, after),
        "download: ITL p99 with / streams alone": slow / report["alone"]["itl"]["p99_ms"],
    }
