"""When requests must be through, in the order of their moments. Knows moments and ids, and ends nobody itself."""

import heapq
from collections.abc import Collection, Iterator

MAX_SURPLUS = 64  # entries of requests that ended before their time, beyond as many as there are requests


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
