"""Who asks for an adapter right now, from the moment that a request comes until it is over. Finds out what an unload has left to end.

Belongs to the driver's event loop.
"""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from loray.deployments.adapter_records import AdapterRecord, now_ms
from loray.deployments.request import AdapterRef

NEXT_S = 0.2  # after a chat's template its request comes


@dataclass(slots=True)
class _Callers:
    num: int = 0
    last_began: int = 0  # when the latest of them was asked by its client, as records are numbered


class AdapterCallers:
    """By reference, without anybody's token and written in one way; merges by their name, as they are unloaded."""

    def __init__(
        self, unload_after: Callable[[AdapterRef, int], AdapterRecord | None], end: Callable[[AdapterRef, AdapterRef], None]
    ) -> None:
        """unload_after: the unload that counts, if it came after a moment. end: told of a reference, and of that of the unload, when nobody
        is left of those who had asked before it: they may have come from a replica that was lost."""
        self._callers: dict[AdapterRef | str, _Callers] = {}
        self._unload_after = unload_after
        self._end = end

    @contextmanager
    def counted(self, key: AdapterRef, began_ms: int) -> Iterator[None]:
        """began_ms: 0 = now."""
        callers = self._callers.setdefault(_unit(key), _Callers())
        callers.num += 1
        callers.last_began = max(callers.last_began, began_ms or now_ms())
        try:
            yield
        finally:
            callers.num -= 1
            if not callers.num:
                if self._unload_after(key, callers.last_began):
                    asyncio.get_running_loop().call_later(NEXT_S, self._look_again, key, callers)
                else:
                    del self._callers[_unit(key)]

    def _look_again(self, key: AdapterRef, callers: _Callers) -> None:
        if callers.num or self._callers.get(_unit(key)) is not callers:
            return
        del self._callers[_unit(key)]
        if unload := self._unload_after(key, callers.last_began):
            self._end(key, unload.ref)


def _unit(key: AdapterRef) -> AdapterRef | str:
    """What one unload is of."""
    return key.adapter_id if key.merge else key
