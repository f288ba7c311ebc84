"""One request at two driver replicas, as Serve may bring about: real drivers, engines and token channel over simulated ranks."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from loray.deployments import driver_client
from loray.deployments.driver_client import DriverClient
from loray.deployments.errors import DeadlineExceeded
from loray.deployments.request import GenerationRequest, TokenEvent
from loray.models.step import Sampling
from tests.deployments.local_driver import driver_over
from tests.deployments.rank_in_process import RankInProcess, start_engine
from tests.deployments.scripted_backend import run
from tests.deployments.simulated_rank import greedy

pytestmark = pytest.mark.slow  # waits

PROMPT = [5, 6]
WHOLE = greedy("", PROMPT, 8)
NAME = "r"
NUM_FIRST = 3  # tokens that the first replica makes before it is held back


def request(name: str = NAME, output_ids: list[int] | None = None, deadline_s: float = 0.0) -> GenerationRequest:
    return GenerationRequest(
        request_id=name, prompt_ids=PROMPT, output_ids=output_ids or [], max_new_tokens=8, sampling=Sampling(), deadline_s=deadline_s
    )


class Replicas:
    """The first is held back after NUM_FIRST tokens; then Serve tries the second. Lives in the loop that runs."""

    def __init__(self, max_running: int = 8) -> None:
        self.ranks = [RankInProcess(), RankInProcess()]
        self.ranks[0].pause_after(NUM_FIRST)
        self.first, self.second = (driver_over(start_engine(rank, max_running)) for rank in self.ranks)
        self.is_tried_again = asyncio.Event()
        self.calls: list[asyncio.Task[None]] = []
        handle: Any = SimpleNamespace(submit=self)
        self.client = Client(handle, handle)

    def remote(self, *message: Any) -> asyncio.Task[None]:
        """The call is that of the second try."""
        self.calls += [asyncio.create_task(self.first.submit(*message)), asyncio.create_task(self._try_again(*message))]
        return self.calls[-1]

    async def _try_again(self, *message: Any) -> None:
        await self.is_tried_again.wait()
        await self.second.submit(*message)

    async def tokens(self, wanted: GenerationRequest) -> list[int]:
        """All that come of it."""
        token_ids: list[int] = []
        async with aclosing(self.client.generate(wanted)) as events:
            async for event in events:
                token_ids += event.token_ids
                if len(token_ids) >= NUM_FIRST:
                    self.is_tried_again.set()
        return token_ids

    async def end(self) -> None:
        self.is_tried_again.set()
        for rank in self.ranks:
            rank.gate.set()
        await asyncio.gather(*self.calls, return_exceptions=True)


class Client(DriverClient):
    """Notes the errors that arrived of the request that all is about."""

    def __init__(self, driver: Any, registry: Any) -> None:
        super().__init__(driver, registry)
        self.has_error = asyncio.Event()

    def _deliver(self, event: TokenEvent) -> None:
        super()._deliver(event)
        if event.error and event.request_id.startswith(NAME):
            self.has_error.set()


def play(scenario: Callable[[Replicas], Awaitable[None]], max_running: int = 8) -> None:
    async def work() -> None:
        replicas = Replicas(max_running)
        try:
            await scenario(replicas)
        finally:
            await replicas.end()

    run(work())


@pytest.mark.parametrize("num_before", [0, 2], ids=["fresh", "resumed"])
def test_what_two_replicas_make_of_one_request_comes_once(num_before: int) -> None:
    async def scenario(replicas: Replicas) -> None:
        assert await replicas.tokens(request(output_ids=WHOLE[:num_before])) == WHOLE[num_before:]
        assert len(replicas.calls) == 2, "nobody took it for lost"

    play(scenario)


def test_a_replica_that_refuses_does_not_cut_the_stream_of_the_other() -> None:
    """The second is full, and says so after the first tokens of the first."""

    async def scenario(replicas: Replicas) -> None:
        replicas.ranks[1].gate.clear()
        address = replicas.client._receiver.address
        for running, waiting in [(1, 0), (1, 1), (1, 2)]:
            other = msgspec.msgpack.encode(request(f"other{waiting}"))
            replicas.calls.append(asyncio.create_task(replicas.second.submit(other, address.endpoint, address.public_key)))
            while (stats := replicas.second._engine.stats())["running"] != running or stats["waiting"] != waiting:
                await asyncio.sleep(0)
        collecting = asyncio.create_task(replicas.tokens(request()))
        await replicas.client.has_error.wait()
        replicas.ranks[0].gate.set()
        assert await collecting == WHOLE
        assert len(replicas.calls) == 3 + 2, "nobody took it for lost"

    play(scenario, max_running=1)


def test_a_failure_among_a_replicas_own_tokens_ends_the_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver_client, "GRACE_S", 60.0)  # the client itself would end it then

    async def scenario(replicas: Replicas) -> None:
        replicas.ranks[1].gate.clear()
        with pytest.raises(DeadlineExceeded, match=f"{NUM_FIRST} tokens were generated"):
            await replicas.tokens(request(deadline_s=2.0))
        assert len(replicas.calls) == 2, "nobody took it for lost"

    play(scenario)
