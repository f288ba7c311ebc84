"""Whether tokens can be made now, and whether one ever was. Knows neither HTTP nor what ails the backend."""

import asyncio

from loray.deployments import request_log
from loray.deployments.errors import LorayError, Unhealthy
from loray.deployments.generation import Timing
from loray.deployments.request import GenerationRequest
from loray.deployments.service import ANSWER_S, Service
from loray.models.step import Sampling


class Health:
    def __init__(self, service: Service) -> None:
        self._service = service
        self._first_token: asyncio.Task[None] | None = None  # the latest try to make one

    async def check(self) -> None:
        """Raises Unhealthy."""
        try:
            async with asyncio.timeout(ANSWER_S):
                healthy = await self._service.backend.healthy()
        except Exception:  # whatever keeps it from answering, it makes no tokens
            healthy = False
        if not healthy:
            raise Unhealthy("unhealthy")

    async def check_started(self) -> None:
        """Makes one real token, unless there was one. All who ask wait for the same; it goes on when they no longer do."""
        if self._service.has_generated:
            return
        if self._first_token is None or self._first_token.done():
            self._first_token = asyncio.create_task(self._make_token())
        try:
            await asyncio.wait_for(asyncio.shield(self._first_token), ANSWER_S)
        except (LorayError, TimeoutError) as error:
            raise Unhealthy("unhealthy") from error

    async def _make_token(self) -> None:
        request = GenerationRequest(
            request_id=request_log.new_sequence_id(), prompt_ids=[0], max_new_tokens=1, sampling=Sampling(), trace=request_log.trace()
        )
        async with self._service.generation(request, [], Timing()) as generation:
            async for _ in generation:
                pass
