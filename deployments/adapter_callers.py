"""Who asks for an adapter right now, from the moment that a request comes until it is over. Belongs to the driver's event loop."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from loray.deployments.adapter_records import now_ms
from loray.deployments.request import AdapterRef


@dataclass(slots=True)
class _Callers:
    num: int = 0
    last_began: int = 0  # when the latest of them was asked by its client, as records are numbered


class AdapterCallers:
    """By reference, without anybody's token and written in one way."""

    def __init__(self, on_last: Callable[[AdapterRef, int], None]) -> None:
        """on_last is told when nobody is left, and when the latest of those who were there together had begun."""
        self._callers: dict[AdapterRef, _Callers] = {}
        self._on_last = on_last

    @contextmanager
    def counted(self, key: AdapterRef, began_ms: int) -> Iterator[None]:
        """began_ms: 0 = now."""
        callers = self._callers.setdefault(key, _Callers())
        callers.num += 1
        callers.last_began = max(callers.last_began, began_ms or now_ms())
        try:
            yield
        finally:
            callers.num -= 1
            if not callers.num:
                del self._callers[key]
                self._on_last(key, callers.last_began)
