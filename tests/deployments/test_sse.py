"""Streams as bytes: what comes at once, what comes while nothing comes, and how errors look then."""

import asyncio
import selectors
import threading
from collections.abc import AsyncGenerator
from typing import Any

import httpx
import pytest
from starlette.background import BackgroundTask

from loray.deployments.error_shapes import native_body
from loray.deployments.errors import Incomplete, Overloaded
from loray.deployments.http_app import make_app
from loray.deployments.sse import KEEP_ALIVE, Batches, EventStream, event_stream
from tests.deployments.live_server import eventually, live
from tests.deployments.scripted_backend import BASE, ScriptedBackend, run, saying, send, service_of

IMPATIENT = {"limits": {"keep_alive_s": 0.02}}
STREAMS = [("/generate_stream", {"inputs": "hi"}), ("/v1/completions", {"model": BASE, "prompt": "hi", "stream": True})]


def events_of(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("data: ")]


@pytest.mark.parametrize(("path", "body"), STREAMS)
def test_a_slow_stream_sends_comments_and_the_same_events(path: str, body: dict[str, Any]) -> None:
    slow = send(service_of(saying("ab", turn_s=0.1), **IMPATIENT), "POST", path, json=body)
    quick = send(service_of(saying("ab")), "POST", path, json=body)
    assert slow.status_code == 200 and slow.text.count(": keep-alive\n\n") >= 3
    assert ": keep-alive" not in quick.text
    assert len(events_of(slow.text)) == len(events_of(quick.text)) > 2


def test_a_stream_that_waits_long_for_its_first_token_starts_with_a_comment() -> None:
    released = threading.Event()

    class Waiting(ScriptedBackend):
        async def generate(self, request: Any) -> Any:
            await asyncio.to_thread(released.wait)
            async for event in super().generate(request):
                yield event

    app = make_app(service_of(Waiting([[5]], finish="length"), **IMPATIENT))
    with live(app) as address, httpx.stream("POST", f"{address}/generate_stream", json={"inputs": "hi"}) as response:
        chunks = response.iter_raw()
        assert (response.status_code, next(chunks)) == (200, KEEP_ALIVE)
        released.set()
        assert "generated_text" in b"".join(chunks).decode()


def test_that_comment_waits_for_nothing_more() -> None:
    """Neither for the first token, which never comes here, nor for another silence: nobody sends these bytes."""

    async def never() -> Batches:
        await asyncio.Event().wait()
        yield []

    async def first_bytes() -> Any:
        stream = await event_stream(never(), dict, native_body, keep_alive_s=0.02)
        try:
            return await asyncio.wait_for(anext(stream.body_iterator), 5)  # type: ignore[call-overload]
        finally:
            await stream._content.aclose()

    assert run(first_bytes()) == KEEP_ALIVE


def test_an_error_before_the_first_token_has_a_status_and_a_late_one_is_an_event() -> None:
    at_once = send(service_of(ScriptedBackend([Overloaded("full")]), **IMPATIENT), "POST", "/generate_stream", json={"inputs": "hi"})
    assert at_once.status_code == 429
    late = send(service_of(ScriptedBackend([Incomplete("lost")], turn_s=0), **IMPATIENT), "POST", "/generate_stream", json={"inputs": "hi"})
    assert late.status_code == 500

    class Slow(ScriptedBackend):
        async def generate(self, request: Any) -> Any:
            await asyncio.sleep(0.1)
            raise Incomplete("lost")
            yield

    service = service_of(Slow([]), **IMPATIENT)
    later = send(service, "POST", "/generate_stream", json={"inputs": "hi"})
    assert later.status_code == 200
    assert events_of(later.text) == ['data: {"error":"lost","error_type":"incomplete_generation"}']
    assert 'loray_failures_total{type="incomplete_generation"} 1.0' in send(service, "GET", "/metrics").text


def test_a_client_that_leaves_before_the_first_token_ends_the_generation() -> None:
    endings = []

    class Waiting(ScriptedBackend):
        async def generate(self, request: Any) -> Any:
            try:
                await asyncio.Event().wait()
                yield
            except asyncio.CancelledError:
                endings.append("cancelled")
                raise

    with live(make_app(service_of(Waiting([]), **IMPATIENT))) as address:
        with httpx.stream("POST", f"{address}/generate_stream", json={"inputs": "hi"}) as response:
            next(response.iter_raw())
        assert eventually(lambda: endings == ["cancelled"])


@pytest.mark.parametrize(("path", "body"), STREAMS)
def test_the_first_token_is_sent_while_the_second_is_not_made_yet(path: str, body: dict[str, Any]) -> None:
    class OneToken(ScriptedBackend):
        async def generate(self, request: Any) -> Any:
            async for event in super().generate(request):
                yield event
                if event.token_ids:
                    await asyncio.Event().wait()

    app = make_app(service_of(OneToken([[65], [66]])))
    with live(app) as address, httpx.stream("POST", f"{address}{path}", json=body) as response:
        assert next(response.iter_raw()).startswith(b"data: {")


class Clock(selectors.SelectSelector):
    """Of an event loop whose time passes at once while all of it sleeps."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        self.now += timeout or 0.0
        return super().select(0)


def sent_with_pauses(pause_s: float, keep_alive_s: float, work_after_s: float = 0.0) -> list[bytes]:
    """The bytes of a stream of eight events, after which the response has that much to do."""
    sent: list[bytes] = []

    async def content() -> AsyncGenerator[bytes, None]:
        for _ in range(8):
            await asyncio.sleep(pause_s)
            yield b"data"

    async def send_message(message: Any) -> None:
        sent.append(message.get("body", b""))

    async def nothing() -> Any:
        await asyncio.Event().wait()

    clock = Clock()
    loop = asyncio.SelectorEventLoop(clock)
    loop.time = lambda: clock.now  # type: ignore[method-assign]
    try:
        stream = EventStream(content(), {}, keep_alive_s)
        stream.background = BackgroundTask(asyncio.sleep, work_after_s)
        loop.run_until_complete(stream({"type": "http", "asgi": {"spec_version": "2.4"}}, nothing, send_message))
    finally:
        loop.close()
    return [body for body in sent if body]


def test_comments_are_sent_in_silence_and_never_between_events_that_come_in_time() -> None:
    assert sent_with_pauses(pause_s=10, keep_alive_s=15) == [b"data"] * 8
    assert sent_with_pauses(pause_s=40, keep_alive_s=15) == [KEEP_ALIVE, KEEP_ALIVE, b"data"] * 8


def test_no_comment_follows_the_end() -> None:
    assert sent_with_pauses(pause_s=10, keep_alive_s=15, work_after_s=100) == [b"data"] * 8
