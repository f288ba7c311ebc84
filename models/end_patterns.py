"""Which of a stranger's patterns is the first to take the end of a module's name. Most are plain names: looked up, not tried.

PEFT tries each in turn for each module, `(.*\\.)?(pattern)$`; a pattern for every module of a large model would take seconds.
"""

from collections.abc import Callable, Iterable
from itertools import accumulate

from loray.models.bounded_patterns import Pattern, PatternBudget, is_name

Lengths = tuple[int, ...]  # of a name's parts


class EndPatterns:
    """compile: makes a pattern of what is no plain name."""

    def __init__(self, patterns: Iterable[str], compile: Callable[[str], Pattern], budget: PatternBudget) -> None:
        self._budget = budget
        self._others: dict[int, Pattern] = {}  # by number
        self._names: dict[Lengths, dict[tuple[str, ...], int]] = {}  # parts of a name -> its number
        for number, pattern in enumerate(patterns):
            if is_name(pattern):
                parts = tuple(pattern.split("."))  # of a pattern, where a point is any character
                self._names.setdefault(tuple(map(len, parts)), {})[parts] = number
            else:
                self._others[number] = compile(pattern)

    def first(self, name: str) -> int | None:
        """Its number. Raises PatternError."""
        with self._budget.charged():
            ends = ((numbers, _end(name, lengths)) for lengths, numbers in self._names.items())
            number = min((numbers[end] for numbers, end in ends if end in numbers), default=None)
        earlier = {other: pattern for other, pattern in self._others.items() if number is None or other < number}
        found = self._budget.first(earlier.values(), name)
        return list(earlier)[found[0]] if found else number


def _end(name: str, lengths: Lengths) -> tuple[str, ...]:
    """The end of the name in parts so long, with a character between them; nothing where it does not begin there."""
    start = len(name) - sum(lengths) - len(lengths) + 1
    if start < 0 or (start > 0 and name[start - 1] != "."):
        return ()
    starts = accumulate(lengths[:-1], lambda begin, length: begin + length + 1, initial=start)
    return tuple(name[begin : begin + length] for begin, length in zip(starts, lengths, strict=True))
