"""The clients of the adapter benchmarks: streamed requests over HTTP and when their tokens came. Starts no server."""

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from string import ascii_lowercase
from typing import Any

import aiohttp
import numpy as np

from benchmarks.adapters_server import ADMIN_KEY

OK, TOO_MANY = 200, 429
TIME_HEADERS = ("x-time-to-first-token", "x-validation-time", "x-queue-time")
NO_LIMIT = aiohttp.ClientTimeout(total=None, sock_read=600)  # seconds
IDLE_S = 60.0


@dataclass(frozen=True)
class Wish:
    """One request. Equal numbers mean equal prompts."""

    number: int
    adapter_id: str  # "" = the base model
    num_prompt: int
    num_new: int

    @property
    def body(self) -> dict[str, Any]:
        """A letter and its space have at least one token, so there are enough to cut the prompt to its length."""
        prompt = " ".join(random.Random(self.number).choices(ascii_lowercase, k=self.num_prompt))
        parameters = {"max_new_tokens": self.num_new, "truncate": self.num_prompt, "ignore_eos_token": True, "adapter_id": self.adapter_id}
        return {"inputs": prompt, "parameters": parameters}


@dataclass
class Answer:
    wish: Wish
    sent: float
    times: list[float] = field(default_factory=list)  # of the tokens, in seconds
    lines: list[bytes] = field(default_factory=list)  # the events, unread: reading them takes the cores that are measured
    status: int = 0  # 0 = none came
    error: str = ""
    retry_after: float = 1.0  # seconds
    server_ttft: float | None = None  # seconds, as the ingress counts them from when it has the request; the slowest begin without
    engine_ttft: float | None = None  # of these, since it heard that the engine has it: too few when the ingress itself is behind

    @property
    def is_ok(self) -> bool:
        return self.status == OK and not self.error and len(self.times) == self.wish.num_new

    @property
    def token_ids(self) -> list[int]:
        return [json.loads(line.removeprefix(b"data: "))["token"]["id"] for line in self.lines]

    @property
    def ttft(self) -> float:
        return self.times[0] - self.sent


class Client:
    """aiohttp and no parsing of tokens: the client shares the server's cores."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self._session = session
        self._url = url

    async def send(self, wish: Wish, into: list[Answer]) -> Answer:
        """The answer is among the others from the start, and has what came also when this is cancelled."""
        answer = Answer(wish, time.perf_counter())
        into.append(answer)
        try:
            async with self._session.post(f"{self._url}/generate_stream", json=wish.body) as response:
                answer.status = response.status
                if response.status != OK:
                    answer.retry_after = float(response.headers.get("Retry-After", 1))
                    answer.error = (await response.text())[:300]
                    return answer
                if all(name in response.headers for name in TIME_HEADERS):
                    total, validation, queue = (int(response.headers[name]) / 1000 for name in TIME_HEADERS)
                    answer.server_ttft, answer.engine_ttft = total, total - validation - queue
                async for line in response.content:
                    if line.startswith(b'data: {"error"'):
                        answer.error = line.decode()[:300]
                    elif line.startswith(b"data: "):
                        answer.times.append(time.perf_counter())
                        answer.lines.append(line)
        except aiohttp.ClientError as error:
            answer.error = repr(error)
        return answer

    async def closed_loop(self, wishes: Iterable[Wish], num_clients: int) -> list[Answer]:
        """Each client sends its next request when its last one is answered."""
        answers: list[Answer] = []
        left = iter(wishes)

        async def one() -> None:
            for wish in left:
                await self.send(wish, answers)

        await asyncio.gather(*(one() for _ in range(num_clients)))
        return answers

    async def stats(self) -> dict[str, float]:
        """The driver's numbers."""
        async with self._session.get(f"{self._url}/metrics", headers={"Accept": "application/json"}) as response:
            families = await response.json()
        prefix = "loray_driver_"
        samples = [one["samples"][0] for one in families if one["name"].startswith(prefix)]  # of the first replica
        return {sample["name"].removeprefix(prefix): sample["value"] for sample in samples}

    async def info(self) -> dict[str, Any]:
        async with self._session.get(f"{self._url}/info") as response:
            return dict(await response.json())

    async def adapters(self) -> dict[str, dict[str, Any]]:
        headers = {"Authorization": f"Bearer {ADMIN_KEY}"}
        async with self._session.get(f"{self._url}/admin/adapters", headers=headers) as response:
            return {one["adapter_id"]: one for one in (await response.json())["adapters"]}

    async def wait_until_idle(self) -> None:
        deadline = time.monotonic() + IDLE_S
        while (stats := await self.stats())["running"] or stats["waiting"]:
            assert time.monotonic() < deadline, f"still at work: {stats}"
            await asyncio.sleep(0.2)


@asynccontextmanager
async def connected(url: str) -> AsyncIterator[Client]:
    async with aiohttp.ClientSession(timeout=NO_LIMIT, connector=aiohttp.TCPConnector(limit=0)) as session:
        yield Client(session, url)


def measured(url: str, work: Callable[[Client], Any]) -> Any:
    """What `work` answers, in an event loop of its own."""

    async def run() -> Any:
        async with connected(url) as client:
            return await work(client)

    return asyncio.run(run())


def quantiles(seconds: Sequence[float]) -> dict[str, float]:
    """Milliseconds; without any there is nothing to tell."""
    if not seconds:
        return {"count": 0}
    p50, p99, most = (round(1000 * float(np.quantile(seconds, q)), 1) for q in (0.5, 0.99, 1))
    return {"count": len(seconds), "p50_ms": p50, "p99_ms": p99, "max_ms": most}


def first_tokens(answers: Iterable[Answer]) -> dict[str, dict[str, float]]:
    """As the client sees it, and what of it is spent behind the ingress and in the engine; the rest goes to HTTP and to Serve."""
    answered = [answer for answer in answers if answer.times]
    return {
        "ttft": quantiles([answer.ttft for answer in answered]),
        "ttft_from_ingress": quantiles([answer.server_ttft for answer in answered if answer.server_ttft is not None]),
        "ttft_from_engine": quantiles([answer.engine_ttft for answer in answered if answer.engine_ttft is not None]),
    }


def gaps(answers: Iterable[Answer], start: float = float("-inf"), end: float = float("inf")) -> list[float]:
    """Seconds between two tokens of a request, both within the time."""
    return [
        later - earlier
        for answer in answers
        for earlier, later in zip(answer.times, answer.times[1:], strict=False)
        if earlier >= start and later <= end
    ]


def outcomes(answers: Iterable[Answer]) -> dict[str, Any]:
    """How they ended; a whole answer has status 200 and all its tokens."""
    answers = list(answers)
    failed = [answer for answer in answers if not answer.is_ok]
    return {
        "requests": len(answers),
        "whole": len(answers) - len(failed),
        "statuses": dict(Counter(str(answer.status) for answer in answers)),
        "errors": sorted({answer.error or "some tokens are missing" for answer in failed})[:5],
    }
