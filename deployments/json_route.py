"""Routes whose JSON bodies are read so that no stream waits long for it. Knows no fields."""

import gc
import json
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute

LARGE_BYTES = 64 << 10


class JsonRoute(APIRoute):
    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handle_json(request: Request) -> Response:
            return await handle(_JsonRequest(request.scope, request.receive))

        return handle_json


class _JsonRequest(Request):
    async def json(self) -> Any:
        if not hasattr(self, "_read"):
            self._read = read_json(await self.body())
        return self._read


def read_json(body: bytes) -> Any:
    """The collector of cycles looks again and again at the lists and objects of a large body, of which none is garbage: without it,
    they are read five times as fast."""
    is_paused = len(body) > LARGE_BYTES and gc.isenabled()
    if is_paused:
        gc.disable()
    try:
        return json.loads(body)
    finally:
        if is_paused:
            gc.enable()
