"""How many are at something now. Knows neither who nor what."""

from collections import Counter
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from typing import TypeVar

K = TypeVar("K", bound=Hashable)


@contextmanager
def counted(counts: Counter[K], key: K) -> Iterator[None]:
    """One more as long as the block lasts; keys that nobody is at are not kept."""
    counts[key] += 1
    try:
        yield
    finally:
        counts[key] -= 1
        if not counts[key]:
            del counts[key]
