"""When requests must be through: what is left of their time, and the order of their moments. Knows moments and ids alone."""

import asyncio
import heapq
import time
from collections.abc import AsyncIterator, Collection, Iterator
from contextlib import asynccontextmanager

from loray.deployments.errors import DeadlineExceeded

MIN_LEFT_S = 0.001  # 0 would be no limit
MAX_SURPLUS = 64  # entries of requests that ended before their time, beyond as many as there are requests


def seconds_left(limit_s: float, since: float) -> float:
    """Of a limit that runs since that moment of the monotonic clock. 0 = there is none; of one that is over a little is left."""
    return max(MIN_LEFT_S, limit_s - (time.monotonic() - since)) if limit_s > 0 else 0.0


@asynccontextmanager
async def in_time(limit_s: float, doing: str) -> AsyncIterator[None]:
    """Ends the block with DeadlineExceeded after so many seconds, 0 = never. `doing` says how far it was then."""
    timer = asyncio.timeout(limit_s if limit_s > 0 else None)
    try:
        async with timer:
            yield
    except TimeoutError as error:
        if not timer.expired():
            raise
        raise DeadlineExceeded(doing) from error


class Deadlines:
    """Moments are seconds of one monotonic clock."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, str]] = []  # of requests that ended meanwhile too

    def add(self, request_id: str, moment: float) -> None:
        heapq.heappush(self._heap, (moment, request_id))

    def seconds_left(self, now: float) -> float | None:
        """Until the earliest; None where there is none."""
        return max(self._heap[0][0] - now, 0.0) if self._heap else None

    def pop_due(self, now: float) -> Iterator[str]:
        while self._heap and self._heap[0][0] <= now:
            yield heapq.heappop(self._heap)[1]

    def forget_ended(self, living: Collection[str]) -> None:
        """Drops what is left of requests that ended, once it has become more than what lives."""
        if len(self._heap) > 2 * len(living) + MAX_SURPLUS:
            self._heap = [(moment, request_id) for moment, request_id in self._heap if request_id in living]
            heapq.heapify(self._heap)
