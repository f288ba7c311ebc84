"""Matches regular expressions of strangers as Python's `re` would, in bounded time and memory. Knows nothing of adapters.

`re` holds the interpreter's lock while it backtracks, for as long as that takes; `regex` has a time limit and can let go of the lock.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from time import sleep, thread_time
from typing import Any

import regex

MAX_PATTERN_LEN = 4096
MAX_COMPILED_LEN = 16384  # `regex` writes counted repetitions out: without this limit, 60 characters fill the memory
MAX_SECONDS_LOCKED = 0.001  # of one match; to let go of the lock costs more than most take
SECONDS_BETWEEN_PAUSES = 0.002  # else others would have the lock every 5 ms, and only until they let go of it themselves
PAUSE_SECONDS = 0.0002

_PLAIN = re.compile(r"[\w.-]+", re.ASCII)
_COUNT = re.compile(r"\{(\d*)(,?)(\d*)\}")
# Fuzzy matching and POSIX classes, which `re` reads as plain characters; conditions, which see other groups of a repetition.
_OTHERWISE_IN_REGEX = re.compile(r"\{(?!\d*(,\d*)?\})|\[:\^?\w+:\]|\(\?\(")


def is_name(pattern: str) -> bool:
    """A plain name, in which nothing but points stands for anything else."""
    return _PLAIN.fullmatch(pattern) is not None


class PatternError(Exception):
    """The pattern cannot be used; the message says why, not where it stands."""


@dataclass(frozen=True, slots=True)
class Pattern:
    match: Callable[..., Any]  # of the compiled pattern: match or fullmatch
    is_plain: bool  # a name, which takes no time


class PatternBudget:
    """Compiles and matches; all of it together may take so much of the thread's time."""

    def __init__(self, max_seconds: float) -> None:
        self._seconds_left = max_seconds
        self._seconds_in_a_row = 0.0
        self._mark = 0.0  # the thread's time when it was last charged

    def compile(self, pattern: str, before: str = "", after: str = "", is_full: bool = False) -> Pattern:
        """before, after: trusted expressions around the stranger's. is_full: the text must match to its end."""
        self._mark = thread_time()
        _check_text(pattern)
        whole, is_plain = f"{before}{pattern}{after}", is_name(pattern)
        try:
            compiled: Any = re.compile(whole)  # first, for `regex` understands more than PEFT's `re`
            if not is_plain:
                compiled = regex.compile(whole, regex.V0)
        except (re.error, regex.error, ValueError) as error:  # the last: of flags that exclude each other
            raise PatternError(f"is no regular expression: {error}") from None
        except (RecursionError, OverflowError):
            raise PatternError("is too deeply nested or repeated too often") from None
        self._charge()
        return Pattern(compiled.fullmatch if is_full else compiled.match, is_plain)

    def first(self, patterns: Iterable[Pattern], text: str) -> tuple[int, Any] | None:
        """The number of the first that matches, and its match."""
        with self.charged():
            matches = (pattern.match(text) if pattern.is_plain else self._match(pattern, text) for pattern in patterns)
            return next(((number, match) for number, match in enumerate(matches) if match), None)

    @contextmanager
    def charged(self) -> Iterator[None]:
        """What is done meanwhile counts. Raises PatternError where it was too much."""
        self._mark = thread_time()
        yield
        self._charge()

    def _match(self, pattern: Pattern, text: str) -> Any:
        self._charge()
        try:
            return pattern.match(text, timeout=MAX_SECONDS_LOCKED, concurrent=False)
        except TimeoutError:
            self._charge()
        try:
            return pattern.match(text, timeout=self._seconds_left, concurrent=True)
        except TimeoutError:
            self._seconds_left = 0
            self._charge()

    def _charge(self) -> None:
        """The time since the mark."""
        now = thread_time()
        self._seconds_left -= now - self._mark
        if self._seconds_left <= 0:
            raise PatternError("takes too long to match")
        self._seconds_in_a_row += now - self._mark
        self._mark = now
        if self._seconds_in_a_row > SECONDS_BETWEEN_PAUSES:
            sleep(PAUSE_SECONDS)
            self._seconds_in_a_row = 0.0


def _check_text(pattern: str) -> None:
    if len(pattern) > MAX_PATTERN_LEN:
        raise PatternError(f"has {len(pattern)} characters, more than {MAX_PATTERN_LEN}")
    # Blanks and comments could hide what is repeated; `re` goes through every character of a range beyond ASCII.
    if not pattern.isascii() or not pattern.isprintable() or re.search(r"[ #]|\\[uUN]", pattern):
        raise PatternError("has characters that are in no module's name")
    if _OTHERWISE_IN_REGEX.search(pattern):
        raise PatternError("has braces that are no count, a named class of characters or a condition")
    counts = [_num_written(*count.groups()) for count in _COUNT.finditer(pattern)]
    if len(pattern) * prod(counts) * 2 ** pattern.count(")+") > MAX_COMPILED_LEN:  # x+ is written out as x x*
        raise PatternError("has too many repetitions")


def _num_written(least: str, comma: str, most: str) -> int:
    """How often the compiler writes out what is repeated {least,most} times: x{2,} is x x x*."""
    is_endless = comma and not most
    return int(least or 0) + 1 if is_endless else max(1, int(least or 0), int(most or 0))
