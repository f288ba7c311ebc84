"""The way to the drivers, over the real token channel; in place of Serve's handle stands a script of what replicas do."""

import asyncio
import contextlib
import tracemalloc
from collections.abc import Coroutine, Generator, Sequence
from contextlib import closing
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from ray.exceptions import ActorDiedError, RayTaskError

from loray.cluster.channel import Address
from loray.deployments import driver_client
from loray.deployments.adapter_records import AdapterChange, now_ms
from loray.deployments.adapter_registry import AdapterRegistry, Patience
from loray.deployments.driver_client import MAX_CHANGES, MAX_LOSSES, PAUSE_OF_STREAM_S, DriverClient
from loray.deployments.errors import AdapterChanged, AdapterFailed, DeadlineExceeded, Incomplete, Unhealthy
from loray.deployments.ingress import Ingress
from loray.deployments.registry_follower import RegistryFollower
from loray.deployments.request import AdapterRef, GenerationRequest, TokenEvent
from loray.deployments.token_channel import TokenSender
from loray.deployments.trace_context import TraceContext
from loray.models.step import Sampling
from tests.deployments.scripted_backend import T, run, status_of

Play = Sequence[dict[str, Any]]  # one replica's events; after one that is not the last the replica dies
ACCEPTED: dict[str, Any] = {}
EMBEDDED: dict[str, Any] = {"finish_reason": "embedding", "embedding": [0.5, -1.0]}


class Driver:
    """Each submitted request meets the next replica of the script."""

    def __init__(self, plays: Sequence[Play]) -> None:
        self.plays = iter(plays)
        self.requests: list[GenerationRequest] = []
        self.sender = TokenSender()
        self.delivered = asyncio.Event()

    @property
    def submit(self) -> "Driver":
        return self

    def remote(self, request: bytes, endpoint: str, public_key: bytes) -> "Response":
        self.requests.append(msgspec.msgpack.decode(request, type=GenerationRequest))
        return Response(asyncio.create_task(self._play(self.requests[-1].request_id, Address(endpoint, public_key))))

    async def _play(self, request_id: str, reply: Address) -> None:
        event = TokenEvent(request_id)
        for fields in next(self.plays):
            event = TokenEvent(request_id, **fields)
            self.delivered.clear()
            self.sender.send([(reply, event)])
            await self.delivered.wait()  # what a dying replica sent last may be lost; the tests count on it
        if not event.is_last:
            raise ActorDiedError()


class Response:
    def __init__(self, call: asyncio.Task[None]) -> None:
        self._call = call

    def __await__(self) -> Generator[Any, None, None]:
        return self._call.__await__()

    def cancel(self) -> None:
        self._call.cancel()


class Client(DriverClient):
    """Tells the driver of the test what has arrived."""

    def __init__(self, driver: Driver) -> None:
        super().__init__(driver, None)  # type: ignore[arg-type]
        self._delivered = driver.delivered

    def _deliver(self, event: TokenEvent) -> None:
        super()._deliver(event)
        self._delivered.set()


def request(pooling: Any = "", max_new_tokens: int = 8) -> GenerationRequest:
    return GenerationRequest(request_id="r", prompt_ids=[5, 6], max_new_tokens=max_new_tokens, sampling=Sampling(), pooling=pooling)


def collect(driver: Driver, wanted: GenerationRequest) -> list[TokenEvent]:
    async def events() -> list[TokenEvent]:
        return [event async for event in Client(driver).generate(wanted)]

    return play(driver, events())


def play(driver: Driver, work: Coroutine[Any, Any, T]) -> T:
    with closing(driver.sender):
        return run(work)


def tokens(*token_ids: int, finish_reason: str = "") -> dict[str, Any]:
    return {"token_ids": list(token_ids), "logprobs": [-0.5] * len(token_ids), "finish_reason": finish_reason}


def test_an_embedding_comes_through() -> None:
    accepted, last = collect(Driver([[ACCEPTED, EMBEDDED]]), request("mean"))
    assert (accepted.embedding, last.embedding, last.finish_reason) == ([], [0.5, -1.0], "embedding")


def test_an_embedding_whose_replica_is_lost_is_made_by_another() -> None:
    driver = Driver([[ACCEPTED], [ACCEPTED, EMBEDDED]])
    assert [event.embedding for event in collect(driver, request("mean"))] == [[], [0.5, -1.0]]
    assert [(sent.prompt_ids, sent.pooling, sent.output_ids) for sent in driver.requests] == [([5, 6], "mean", [])] * 2
    assert len({sent.request_id for sent in driver.requests}) == 2


def test_a_generation_goes_on_at_another_replica_after_the_tokens_it_had() -> None:
    driver = Driver([[ACCEPTED, tokens(1), tokens(2, 3)], [ACCEPTED, tokens(4), tokens(7, finish_reason="length")]])
    assert [event.token_ids for event in collect(driver, request())] == [[], [1], [2, 3], [4], [7]]
    assert [sent.output_ids for sent in driver.requests] == [[], [1, 2, 3]]
    assert len({sent.began_ms for sent in driver.requests}) == 1 and 0 <= now_ms() - driver.requests[0].began_ms < 60_000


def test_what_goes_on_elsewhere_says_which_version_of_its_adapter_it_was_begun_with() -> None:
    accepted = {"version": "v1"}
    driver = Driver([[ACCEPTED, accepted, tokens(1)], [accepted, tokens(2)], [accepted, tokens(7, finish_reason="length")]])
    collect(driver, request())
    assert [sent.adapter_version for sent in driver.requests] == ["", "v1", "v1"]


CHANGED = {"error": "AdapterChanged", "message": "its files changed"}


def test_who_has_no_token_yet_is_served_in_the_version_that_is_there_now() -> None:
    driver = Driver([[{"version": "v1"}, CHANGED], [CHANGED], [{"version": "v2"}, tokens(7, finish_reason="length")]])
    assert [event.token_ids for event in collect(driver, request())] == [[], [7]]
    assert len({sent.request_id for sent in driver.requests}) == 3


def test_an_answer_is_of_one_version_and_files_that_never_rest_are_an_error() -> None:
    for plays, num_sent in (([[ACCEPTED, tokens(1), CHANGED | {"num_before": 1}]], 1), ([[CHANGED]] * 99, MAX_CHANGES + 1)):
        driver = Driver(plays)
        with pytest.raises(AdapterChanged, match="its files changed"):
            collect(driver, request())
        assert len(driver.requests) == num_sent


def test_a_generation_that_goes_on_elsewhere_stays_in_its_trace() -> None:
    driver = Driver([[ACCEPTED, tokens(1)], [ACCEPTED, tokens(7, finish_reason="length")]])
    trace = TraceContext(f"00-{'1' * 32}-{'2' * 16}-01", "congo=t61")
    collect(driver, msgspec.structs.replace(request(), trace=trace))
    assert [sent.trace for sent in driver.requests] == [trace] * 2


def test_what_a_lost_replica_used_of_the_deadline_is_used() -> None:
    driver = Driver([[ACCEPTED, tokens(1)], [ACCEPTED, tokens(7, finish_reason="length")]])
    collect(driver, msgspec.structs.replace(request(), deadline_s=60.0))
    first, second = (sent.deadline_s for sent in driver.requests)
    assert 0 < second < first <= 60.0
    unlimited = Driver([[ACCEPTED, tokens(1)], [ACCEPTED, tokens(7, finish_reason="length")]])
    collect(unlimited, request())
    assert [sent.deadline_s for sent in unlimited.requests] == [0.0, 0.0]


class Hangs(Driver):
    """Takes requests, and questions for templates, and never says a word."""

    is_cancelled = False

    @property
    def chat_template(self) -> Any:
        return SimpleNamespace(remote=lambda _: Response(asyncio.create_task(self._play("", Address("", b"")))))

    async def _play(self, request_id: str, reply: Address) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            self.is_cancelled = True


def test_a_deadline_ends_also_what_no_replica_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver_client, "GRACE_S", 0.0)
    driver = Hangs([])

    async def scenario() -> None:
        with pytest.raises(DeadlineExceeded):
            async for _ in Client(driver).generate(msgspec.structs.replace(request(), deadline_s=0.02)):
                raise AssertionError("nothing comes")
        while not driver.is_cancelled:
            await asyncio.sleep(0)

    play(driver, scenario())


def test_a_deadline_ends_also_what_has_tokens_and_gets_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver_client, "GRACE_S", 0.0)

    class Stalls(Driver):
        is_cancelled = False

        async def _play(self, request_id: str, reply: Address) -> None:
            with contextlib.suppress(ActorDiedError):
                await super()._play(request_id, reply)
            try:
                await asyncio.Event().wait()
            finally:
                self.is_cancelled = True

    driver = Stalls([[ACCEPTED, {**tokens(1), "num_before": 0}]])

    async def scenario() -> None:
        with pytest.raises(DeadlineExceeded, match="no replica said more of it"):
            async for _ in Client(driver).generate(msgspec.structs.replace(request(), deadline_s=0.3)):
                pass
        while not driver.is_cancelled:
            await asyncio.sleep(0)

    play(driver, scenario())


def test_a_request_whose_tokens_were_lost_on_the_way_goes_on_at_another_replica() -> None:
    lost = {**tokens(3), "num_before": 2}
    driver = Driver(
        [[ACCEPTED, {**tokens(1), "num_before": 0}, lost], [ACCEPTED, {**tokens(2, 3, finish_reason="length"), "num_before": 1}]]
    )
    assert [event.token_ids for event in collect(driver, request())] == [[], [1], [2, 3]]
    assert [sent.output_ids for sent in driver.requests] == [[], [1]]


def test_a_request_that_no_replica_takes_is_not_held_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver_client, "ACCEPT_S", 0.02)
    driver = Hangs([])

    async def scenario() -> None:
        with pytest.raises(Unhealthy, match="no replica took the request"):
            await anext(Client(driver).generate(request()))

    play(driver, scenario())


def test_an_ingress_that_gets_no_tokens_any_more_is_unhealthy() -> None:
    driver = Hangs([])

    async def scenario() -> None:
        client = Client(driver)
        client.check_receiver()
        client._receiving.cancel()
        await asyncio.wait([client._receiving])
        assert not await client.healthy()

    play(driver, scenario())


def test_a_receiver_that_fails_is_told_at_once_and_holds_up_nobody(caplog: pytest.LogCaptureFixture) -> None:
    """Neither those who wait for tokens then, nor those who come later. Serve learns of it as well."""
    driver = Driver([[ACCEPTED]])

    class Broken(DriverClient):
        def _deliver(self, event: TokenEvent) -> None:
            raise KeyError("a bug")

    async def scenario() -> None:
        client = Broken(driver, None)  # type: ignore[arg-type]
        for _ in range(2):
            with pytest.raises(Unhealthy, match="gets no tokens any more"):
                await anext(client.generate(request()))
        assert "a bug" in caplog.text and len(driver.requests) == 1
        ingress: Any = SimpleNamespace(_client=client)
        with pytest.raises(Unhealthy):
            await Ingress.check_health(ingress)

    play(driver, scenario())


class LeavesTheFirst(Hangs):
    """The first request gets no answer; any other would."""

    def remote(self, request: bytes, endpoint: str, public_key: bytes) -> "Response":
        self.latest = super().remote(request, endpoint, public_key)
        return self.latest

    async def _play(self, request_id: str, reply: Address) -> None:
        await (super()._play if len(self.requests) == 1 else super(Hangs, self)._play)(request_id, reply)


@pytest.mark.parametrize("num_ticks", range(9))
def test_a_client_that_leaves_ends_its_request_and_starts_no_other(num_ticks: int) -> None:
    """Serve cancels the calls that a request has made first, and then the request itself."""
    driver = LeavesTheFirst([[ACCEPTED, tokens(1, finish_reason="length")]])

    async def scenario() -> None:
        asking = asyncio.create_task(anext(Client(driver).generate(request())))
        while not driver.requests:
            await asyncio.sleep(0)
        for _ in range(20):  # until it waits for an answer
            await asyncio.sleep(0)
        driver.latest.cancel()
        for _ in range(num_ticks):
            await asyncio.sleep(0)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        assert len(driver.requests) == 1

    play(driver, scenario())


def test_a_call_that_was_cancelled_while_nobody_left_is_made_again() -> None:
    driver = LeavesTheFirst([[ACCEPTED, tokens(1, finish_reason="length")]])

    async def scenario() -> None:
        asking = asyncio.create_task(anext(Client(driver).generate(request())))
        while not driver.requests:
            await asyncio.sleep(0)
        driver.latest.cancel()
        await asking
        assert len(driver.requests) == 2

    play(driver, scenario())


def test_a_template_whose_adapter_is_long_on_its_way_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver_client, "TEMPLATE_S", 0.02)
    driver = Hangs([])

    async def scenario() -> None:
        with pytest.raises(AdapterFailed, match="'pirate': .* still being fetched; try again"):
            await Client(driver).chat_template(AdapterRef(adapter_id="pirate"))

    play(driver, scenario())


@pytest.mark.parametrize("may_rest", [True, False])
def test_a_stream_pauses_for_those_alone_that_flow(may_rest: bool) -> None:
    driver = Driver([[ACCEPTED, tokens(1), tokens(2, finish_reason="length")]])

    async def pauses() -> list[float]:
        client = Client(driver)
        seen = [client._pause_s()]
        async for _ in client.generate(request(max_new_tokens=2).resting(may_rest)):
            seen.append(client._pause_s())
        return [*seen, client._pause_s()]

    flows = PAUSE_OF_STREAM_S if may_rest else 0.0
    assert play(driver, pauses()) in ([0.0, 0.0, flows, flows, 0.0], [0.0, 0.0, flows, 0.0])  # the two tokens may come together


def test_replicas_that_are_lost_without_a_result_are_an_error() -> None:
    with pytest.raises(Incomplete, match="lost"):
        collect(Driver([[ACCEPTED]] * MAX_LOSSES), request("mean"))


def test_a_token_costs_no_copy_of_those_before_it() -> None:
    """Memory that one more token takes, when there are many: a copy would be of 8 bytes for each of them."""
    num_before = 200_000
    many = tokens(*([1] * num_before))
    driver = Driver([[ACCEPTED, many, tokens(2), tokens(3), tokens(4, finish_reason="length")]])

    async def peak() -> int:
        before, peaks = 0, []
        async for event in Client(driver).generate(request(max_new_tokens=num_before + 3)):
            if event.token_ids in ([3], [4]):
                peaks.append(tracemalloc.get_traced_memory()[1] - before)
            before = tracemalloc.get_traced_memory()[0]
            tracemalloc.reset_peak()
        return max(peaks)

    tracemalloc.start()
    try:
        assert play(driver, peak()) < num_before
    finally:
        tracemalloc.stop()


class Registry:
    """The way to the adapter registry: what it raises arrives wrapped, and a lost one is an error of Ray's."""

    def __init__(self) -> None:
        self.registry = AdapterRegistry(Patience(poll_s=0.2, answer_s=1))
        self.is_lost = False

    async def ask(self, method: str, *messages: bytes) -> bytes:
        if self.is_lost:
            raise ActorDiedError()
        try:
            answer: bytes = await getattr(self.registry, method)(*messages)
            return answer
        except Exception as error:
            raise RayTaskError(method, "a traceback", error).as_instanceof_cause() from error


CHANGE = AdapterChange(action="load", ref=AdapterRef(adapter_id="pirate"))


def test_changes_and_statuses_go_through_the_registry() -> None:
    async def scenario() -> None:
        registry, applied = Registry(), asyncio.Event()

        async def apply(records: bytes) -> None:
            applied.set()

        async def statuses() -> list[Any]:
            return [status_of("pirate")]

        client = DriverClient(None, registry)  # type: ignore[arg-type]
        with pytest.raises(Unhealthy, match="no driver replica"):
            await client.change_adapter(CHANGE)
        following = asyncio.create_task(RegistryFollower(registry, "a", apply, statuses).run())
        while not registry.registry._live():
            await asyncio.sleep(0)
        changed = await client.change_adapter(CHANGE)
        assert applied.is_set() and changed.record.ref == CHANGE.ref
        assert await client.adapter_statuses() == {"a": [status_of("pirate")]}
        await client.undo_adapter_change(changed)
        assert (await client.change_adapter(CHANGE)).previous is None
        following.cancel()

    run(scenario())


def test_a_registry_that_is_lost_is_a_clear_error() -> None:
    async def scenario() -> None:
        registry = Registry()
        registry.is_lost = True
        with pytest.raises(Unhealthy, match="the adapter registry does not answer"):
            await DriverClient(None, registry).adapter_statuses()  # type: ignore[arg-type]

    run(scenario())


def test_the_drivers_numbers_are_those_of_all_replicas_that_answer() -> None:
    class Handle:
        def broadcast(self, method: str) -> "Handle":
            assert method == "replica_stats"
            return self

        async def results_async(self, *, timeout_s: float, return_exceptions: bool) -> list[Any]:
            assert return_exceptions, "one that is lost keeps nobody from telling"
            return [("d1", {"running": 1.0}), ActorDiedError(), ("d2", {"running": 2.0})]

    async def stats() -> dict[str, dict[str, float]]:
        handle: Any = Handle()
        return await DriverClient(handle, handle).stats()

    assert run(stats()) == {"d1": {"running": 1.0}, "d2": {"running": 2.0}}
