"""Server-sent events over HTTP. Knows neither API: it writes the values it is given and stops the work when the client is gone."""

import logging
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from typing import Any

import msgspec
from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from loray.deployments.errors import Incomplete, LorayError

logger = logging.getLogger(__name__)

# Characters that end a line for many clients (Python's splitlines), though not in this format: U+0085, U+2028, U+2029 in UTF-8.
LINE_BREAKS = {b"\xc2\x85": rb"\u0085", b"\xe2\x80\xa8": rb"\u2028", b"\xe2\x80\xa9": rb"\u2029"}
DONE = b"data: [DONE]\n\n"
HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}  # no proxy may hold tokens back

Batches = AsyncGenerator[list[dict[str, Any]], None]  # events that are ready together leave in one write


class EventStream(StreamingResponse):
    """Closes its source when it ends in whatever way; Starlette leaves that to the garbage collector."""

    def __init__(self, content: AsyncGenerator[bytes, None], headers: Mapping[str, str]) -> None:
        super().__init__(content, headers={**HEADERS, **headers}, media_type="text/event-stream")
        self._content = content

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._content.aclose()


async def event_stream(
    batches: Batches, headers: Callable[[], Mapping[str, str]], error_body: Callable[[LorayError], dict[str, Any]], end: bytes = b""
) -> EventStream:
    """Starts only once the first events are there, so that an error before them is raised here and gets a status of its own.

    `headers` is asked after that. An error after that is one more event, the last."""
    first = await anext(batches)
    content = _content(first, batches, error_body, end)
    await anext(content)  # from here on closing it closes the batches
    return EventStream(content, headers())


async def _content(
    first: list[dict[str, Any]], batches: Batches, error_body: Callable[[LorayError], dict[str, Any]], end: bytes
) -> AsyncGenerator[bytes, None]:
    try:
        yield b""
        yield _encode(first)
        async for batch in batches:
            yield _encode(batch)
        if end:
            yield end
    except LorayError as error:
        yield _encode([error_body(error)])
    except Exception:
        logger.exception("a stream failed")
        yield _encode([error_body(Incomplete("internal error"))])
    finally:
        await batches.aclose()


def _encode(events: Iterable[dict[str, Any]]) -> bytes:
    text = b"".join(b"data: " + msgspec.json.encode(event) + b"\n\n" for event in events)
    for raw, escaped in LINE_BREAKS.items():
        text = text.replace(raw, escaped)
    return text
