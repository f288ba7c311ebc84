"""Nine adapters with little traffic, alone and beside one that floods; then ten that all want as much as they can get."""

import asyncio
import math
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from benchmarks.adapters_server import Served, serving
from benchmarks.adapters_traffic import TOO_MANY, Answer, Client, Wish, first_tokens, measured, outcomes
from benchmarks.adapters_zoo import Zoo

NUM_CALM, RANK = 9, 16
NUM_NEW = 16
FLOOD_TIMES = 100  # the flood's requests for each one of a calm adapter
CLIENTS_EACH = 2  # with equal demand
FLOOD_READY_S = 60.0
FLOOD_PAUSE_S = 0.02  # between two of its clients that come
CALM_SHARE = 1 / 3  # of the machine's time that the calm ones take together, if they are answered one by one


@dataclass(frozen=True)
class FairArgs:
    prompt_tokens: int  # of a request: with equal demand of each, else in the mean, from half of it to one and a half
    period_s: float | None  # between two requests of a calm adapter; None: as CALM_SHARE says
    rounds: int  # requests of each calm adapter
    equal_answers: int  # equal demand lasts as long as these take one by one; batched there are more
    max_running: int
    max_batch_tokens: int
    max_waiting: int  # of one adapter


class FairBench:
    def __init__(self, served: Served, url: str, root: Path, args: FairArgs) -> None:
        self._served = served
        self._url = url
        self._root = root
        self._args = args
        self._calm = [f"calm{i}" for i in range(NUM_CALM)]
        self._numbers: Iterator[int] = count()

    def run(self) -> dict[str, Any]:
        zoo = Zoo(self._served.model, self._root)
        for name in (*self._calm, "flood"):
            zoo.add(name, RANK)
        args = self._args
        scheduler = {"max_running": args.max_running, "max_batch_tokens": args.max_batch_tokens}
        adapters = {"local_roots": [self._root], "max_waiting": args.max_waiting}
        with serving(self._served, scheduler=scheduler, adapters=adapters):
            report: dict[str, Any] = measured(self._url, self._measure)
        return {"prompt_tokens": args.prompt_tokens, "new_tokens": NUM_NEW, "scheduler": scheduler, **report}

    async def _measure(self, client: Client) -> dict[str, Any]:
        await client.closed_loop([self._wish(name) for name in (*self._calm, "flood") * 2], 2)
        started = time.perf_counter()
        await client.closed_loop([self._wish(name) for name in self._calm], 1)
        one_s = (time.perf_counter() - started) / NUM_CALM
        period_s = self._args.period_s or NUM_CALM * one_s / CALM_SHARE
        print(f"  a request takes {one_s:.2f} s by itself; each calm adapter has one every {period_s:.1f} s", flush=True)
        alone = await self._calm_traffic(client, period_s)
        await client.wait_until_idle()
        flooded = await self._flooded(client, period_s)
        await client.wait_until_idle()
        equal = await self._equal(client, self._args.equal_answers * one_s)
        return {"request_s": round(one_s, 3), "period_s": round(period_s, 2), "alone": alone, "flooded": flooded, "equal": equal}

    def _wish(self, name: str, rng: random.Random | None = None) -> Wish:
        """rng: chooses how long its prompt is."""
        mean = self._args.prompt_tokens
        return Wish(next(self._numbers), name, rng.randint(mean // 2, mean + mean // 2) if rng else mean, NUM_NEW)

    async def _calm_traffic(self, client: Client, period_s: float) -> dict[str, Any]:
        """Sent on time, answered or not; the adapters' turns are spread and a little uneven, they and the prompts' lengths the same each
        time."""
        answers: list[Answer] = []
        rng = random.Random(0)

        async def ask(wish: Wish, at: float) -> None:
            await asyncio.sleep(at)
            await client.send(wish, answers)

        turns = [(turn, i, name) for turn in range(self._args.rounds) for i, name in enumerate(self._calm)]
        times = [(self._wish(name, rng), (turn + i / NUM_CALM + rng.uniform(0, 0.1)) * period_s) for turn, i, name in turns]
        await asyncio.gather(*(ask(*one) for one in times))
        return {**outcomes(answers), **first_tokens(answers)}

    async def _flooded(self, client: Client, period_s: float) -> dict[str, Any]:
        """So many clients that the queue is always full and those turned away, who come back when told to, make up the flood."""
        num_turned_away = math.ceil(1.2 * FLOOD_TIMES / period_s)  # a little more than a second passes until they come again
        answers: list[Answer] = []
        rng = random.Random(1)
        is_full = asyncio.Event()

        async def flood() -> None:
            while True:
                answer = await client.send(self._wish("flood", rng), answers)
                if answer.status == TOO_MANY:
                    is_full.set()
                    await asyncio.sleep(answer.retry_after)
                else:
                    assert answer.is_ok, answer.error

        tasks: list[asyncio.Task[None]] = []
        async with asyncio.timeout(FLOOD_READY_S):
            while not is_full.is_set():
                tasks.append(asyncio.create_task(flood()))
                await asyncio.sleep(FLOOD_PAUSE_S)
        tasks += [asyncio.create_task(flood()) for _ in range(num_turned_away)]
        num_before, started = len(answers), time.perf_counter()
        calm = await self._calm_traffic(client, period_s)
        num_sent, seconds = len(answers) - num_before, time.perf_counter() - started
        assert not any(task.done() for task in tasks), "every client of the flood goes on"
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        measured_answers = answers[num_before:]
        return {
            **calm,
            "flood_requests_per_s": round(num_sent / seconds, 1),
            "flood_times": round(num_sent / seconds * period_s, 1),
            "flood_answered": sum(answer.is_ok for answer in measured_answers),
            "flood_turned_away": sum(answer.status == TOO_MANY for answer in measured_answers),
            "flood_clients": len(tasks),
        }

    async def _equal(self, client: Client, seconds: float) -> dict[str, Any]:
        answers: list[Answer] = []

        async def ask_on(name: str) -> None:
            while True:
                answer = await client.send(self._wish(name), answers)
                assert answer.is_ok, answer.error

        names = [*self._calm, "flood"]
        tasks = [asyncio.create_task(ask_on(name)) for name in names for _ in range(CLIENTS_EACH)]
        await asyncio.sleep(0.1 * seconds)
        started = time.perf_counter()
        await asyncio.sleep(seconds)
        ended = time.perf_counter()
        assert not any(task.done() for task in tasks), "every client goes on"
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        tokens = dict.fromkeys(names, 0)
        for answer in answers:
            tokens[answer.wish.adapter_id] += sum(started <= at <= ended for at in answer.times)
        mean = sum(tokens.values()) / len(tokens)
        spread = (max(tokens.values()) - min(tokens.values())) / mean
        return {"seconds": round(ended - started, 1), "tokens": tokens, "spread": round(spread, 4)}


def ratios(report: dict[str, Any]) -> dict[str, float]:
    alone, flooded = (report[phase]["ttft"]["p99_ms"] for phase in ("alone", "flooded"))
    return {"fair: TTFT p99 flooded / alone": flooded / alone, "fair: (most - least) / mean tokens": report["equal"]["spread"]}
