"""Server-sent events over HTTP. Knows neither API: it writes the values it is given and stops the work when the client is gone."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from typing import Any

import msgspec
from fastapi.responses import StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from loray.deployments import request_log
from loray.deployments.errors import Incomplete, LorayError

logger = logging.getLogger(__name__)

# Characters that end a line for many clients (Python's splitlines), though not in this format: U+0085, U+2028, U+2029 in UTF-8.
LINE_BREAKS = {b"\xc2\x85": rb"\u0085", b"\xe2\x80\xa8": rb"\u2028", b"\xe2\x80\xa9": rb"\u2029"}
DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"  # a comment
HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}  # no proxy may hold tokens back

Batches = AsyncGenerator[list[dict[str, Any]], None]  # events that are ready together leave in one write


class EventStream(StreamingResponse):
    """Closes its source when it ends in whatever way; Starlette leaves that to the garbage collector. Never silent for long."""

    media_type = "text/event-stream"

    def __init__(self, content: AsyncGenerator[bytes, None], headers: Mapping[str, str], keep_alive_s: float) -> None:
        super().__init__(content, headers={**HEADERS, **headers})
        self._content = content
        self._keep_alive_s = keep_alive_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        loop = asyncio.get_running_loop()
        turn = asyncio.Lock()  # to send; over the two below
        last_sent = 0.0
        is_open = False

        async def send_in_turn(message: Message) -> None:
            nonlocal last_sent, is_open
            async with turn:
                await send(message)
                last_sent = loop.time()
                is_open = message["type"] == "http.response.start" or message.get("more_body", False)

        async def keep_alive() -> None:
            nonlocal last_sent
            wait_s = self._keep_alive_s
            while True:
                await asyncio.sleep(wait_s)
                async with turn:
                    if is_open and loop.time() >= last_sent + self._keep_alive_s:
                        await send({"type": "http.response.body", "body": KEEP_ALIVE, "more_body": True})
                        last_sent = loop.time()
                wait_s = max(0.001, last_sent + self._keep_alive_s - loop.time()) if is_open else self._keep_alive_s

        keeping = asyncio.create_task(keep_alive())
        try:
            await super().__call__(scope, receive, send_in_turn)
        finally:
            keeping.cancel()
            await asyncio.wait([keeping])
            await self._content.aclose()


async def event_stream(
    batches: Batches,
    headers: Callable[[], Mapping[str, str]],
    error_body: Callable[[LorayError], dict[str, Any]],
    end: bytes = b"",
    keep_alive_s: float = 15.0,
) -> EventStream:
    """Starts once the first events are there, so that an error before them is raised here and gets a status of its own.

    If they take too long, it starts without them. `headers` is asked at the start. An error after it is one more event, the last."""
    first = asyncio.ensure_future(anext(batches))
    try:
        await asyncio.wait([first], timeout=keep_alive_s)
        if first.done():
            first.result()
    except BaseException:
        await _stop(first, batches)
        raise
    content = _content(first, batches, error_body, end)
    await anext(content)  # from here on closing it closes the batches
    return EventStream(content, headers(), keep_alive_s)


async def _content(
    first: "asyncio.Future[list[dict[str, Any]]]", batches: Batches, error_body: Callable[[LorayError], dict[str, Any]], end: bytes
) -> AsyncGenerator[bytes, None]:
    try:
        yield b""
        if not first.done():
            yield KEEP_ALIVE
        yield _encode(await first)
        async for batch in batches:
            yield _encode(batch)
        if end:
            yield end
    except LorayError as error:
        request_log.add_failure(error.error_type)
        yield _encode([error_body(error)])
    except Exception:
        logger.exception("a stream failed")
        request_log.add_failure(Incomplete.error_type)
        yield _encode([error_body(Incomplete("internal error"))])
    finally:
        await _stop(first, batches)


async def _stop(first: "asyncio.Future[Any]", batches: Batches) -> None:
    if not first.done():
        first.cancel()
        await asyncio.wait([first])
    await batches.aclose()


def _encode(events: Iterable[dict[str, Any]]) -> bytes:
    text = b"".join(b"data: " + msgspec.json.encode(event) + b"\n\n" for event in events)
    for raw, escaped in LINE_BREAKS.items():
        text = text.replace(raw, escaped)
    return text
