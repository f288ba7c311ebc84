"""The events of one request on their way from the token channel to whoever streams them. Knows neither channel nor HTTP."""

import asyncio
from collections import deque

from loray.deployments.request import TokenEvent


class Mailbox:
    """In order. Tokens that nobody has taken yet are one event, so that a reader who lags behind writes once for all of them.

    Serve may call a second replica when it can't tell whether the first has taken a request. Both make the same tokens, and each counts
    once: the one that comes first."""

    def __init__(self, num_before: int = 0) -> None:
        self._num_tokens = num_before  # of the request's output so far
        self._is_over = False
        self._items: deque[TokenEvent | None] = deque()
        self._has_items = asyncio.Event()

    def put(self, item: TokenEvent | None) -> None:
        if item and (self._is_over or (item.token_ids and 0 <= item.num_before < self._num_tokens)):
            return
        if item:
            self._num_tokens += len(item.token_ids)
            self._is_over = item.is_last
        latest = self._items[-1] if self._items else None
        if latest and item and latest.token_ids and item.token_ids:
            self._items[-1] = latest.joined(item)
        else:
            self._items.append(item)
        self._has_items.set()

    async def get(self) -> TokenEvent | None:
        await self._has_items.wait()
        item = self._items.popleft()
        if not self._items:
            self._has_items.clear()
        return item
