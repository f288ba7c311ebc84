"""A driver over the engine of a test instead of a group of ranks, and ingress's way to it without Serve in between."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from types import SimpleNamespace
from typing import Any

from loray.deployments.adapter_service import AdapterService
from loray.deployments.driver import Driver
from loray.deployments.driver_client import DriverClient
from loray.deployments.driver_log import DriverLog
from loray.deployments.engine import Engine
from loray.deployments.request import GenerationRequest, TokenEvent
from loray.deployments.tracing import Tracing


def driver_over(engine: Engine, adapters: AdapterService | None = None, tracing: Tracing | None = None) -> Driver:
    """Lives in the loop that runs. Without adapters it serves the base model alone."""
    driver = object.__new__(Driver)
    driver._loop = asyncio.get_running_loop()
    driver._engine = engine
    driver._tracing = tracing
    driver._log = DriverLog(tracing)
    if adapters:
        driver._adapters = adapters
    return driver


class LocalBackend:
    """The client of a driver that is made with the first request, for both live in the server's loop."""

    def __init__(self, make_driver: Callable[[], Driver]) -> None:
        self._make_driver = make_driver
        self._client: DriverClient | None = None

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[TokenEvent, None]:
        if self._client is None:
            handle: Any = SimpleNamespace(submit=_Method(self._make_driver().submit))
            self._client = DriverClient(handle, handle)
        async for event in self._client.generate(request):
            yield event


class _Method:
    def __init__(self, method: Callable[..., Any]) -> None:
        self._method = method

    def remote(self, *arguments: Any) -> asyncio.Task[Any]:
        """A task can be awaited and cancelled, as Serve's responses can."""
        return asyncio.create_task(self._method(*arguments))
