"""The events of one request on their way from the token channel to whoever streams them. Knows neither channel nor HTTP."""

import asyncio
from collections import deque
from collections.abc import Callable

from loray.deployments.request import TokenEvent


class ReplicaLost(Exception):
    """The driver replica died under a request, or some of its tokens never came."""


def no_rest() -> float:
    return 0.0


class Mailbox:
    """In order. Tokens that nobody has taken yet are one event, so that a reader who lags behind writes once for all of them. For tokens
    that come within `rest_s()` of what was taken last nobody is woken before that is over, but for the first and the last of a request.

    Serve may call a second replica when it can't tell whether the first has taken a request. Both make the same tokens, and each counts
    once: the one that comes first. An error of the one that is behind is not the request's, for the other goes on."""

    def __init__(self, num_before: int = 0, rest_s: Callable[[], float] = no_rest) -> None:
        self._num_before = num_before  # tokens of the request's output before the first that comes here
        self._num_tokens = num_before  # of its output so far
        self._is_over = False
        self._items: deque[TokenEvent | Exception | None] = deque()
        self._has_items = asyncio.Event()
        self._rest_s = rest_s
        self._taken = 0.0  # when something was, by the loop's clock
        self._waking: asyncio.TimerHandle | None = None

    def put(self, item: TokenEvent | None) -> None:
        if item and (self._is_over or self._is_behind(item)):
            return
        if item and item.token_ids and item.num_before > self._num_tokens:
            return self.fail(ReplicaLost(f"of its tokens those from {self._num_tokens} to {item.num_before - 1} never came"))
        can_wait = item is not None and bool(item.token_ids) and self._num_tokens > self._num_before and not item.is_last
        if item:
            self._num_tokens += len(item.token_ids)
            self._is_over = item.is_last
        latest = self._items[-1] if self._items else None
        if isinstance(latest, TokenEvent) and item and latest.token_ids and item.token_ids:
            self._items[-1] = latest.joined(item)
        else:
            self._items.append(item)
        self._wake(can_wait)

    def fail(self, error: Exception) -> None:
        """Ends the request from this side: it is raised after what came before, unless that is the end."""
        if not self._is_over:
            self._is_over = True
            self._items.append(error)
            self._has_items.set()

    async def get(self) -> TokenEvent | None:
        await self._has_items.wait()
        item = self._items.popleft()
        if not self._items:
            self._has_items.clear()
        self._rest()
        if isinstance(item, Exception):
            raise item
        return item

    def _wake(self, can_wait: bool) -> None:
        loop = asyncio.get_running_loop()
        rest_s = self._taken + self._rest_s() - loop.time() if can_wait else 0.0
        if rest_s <= 0.0:
            self._has_items.set()
        elif not self._waking:
            self._waking = loop.call_later(rest_s, self._has_items.set)

    def _rest(self) -> None:
        self._taken = asyncio.get_running_loop().time()
        if self._waking:
            self._waking.cancel()
            self._waking = None

    def _is_behind(self, event: TokenEvent) -> bool:
        """Whether another replica has told more already. An error that names no number came before its replica's first token."""
        if event.error and event.num_before < 0:
            return self._num_tokens > self._num_before
        return bool(event.error or event.token_ids) and 0 <= event.num_before < self._num_tokens
