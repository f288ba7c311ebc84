"""Finds stop strings in text that comes in pieces. Knows neither tokens nor requests."""

from typing import NamedTuple


class Shelter(NamedTuple):
    """Passages in which no stop string counts, from one marker to the other."""

    begin: str
    end: str
    is_first: bool  # there are some only if the text begins with one; spaces aside


class StopStrings:
    """Gives text out once it can't be part of a stop string any more.

    The stop string that ends first wins, of those the longest; so the way the text is cut into pieces does not matter.
    """

    def __init__(self, stops: list[str], shelter: Shelter | None = None) -> None:
        self._stops = stops
        self._shelter = shelter
        self._is_sheltered = False
        self._latest = ""  # sheltered text, given out already, that may begin the shelter's end
        self._held = ""
        self.matched = ""  # the stop string that was found

    def push(self, piece: str, is_counting: bool = True) -> str:
        """The text that is safe to give out; after a match, what stood before it. Not counting, no stop string ends in this piece."""
        assert not self.matched, "no text comes after a stop string"
        if not self._stops:
            return piece
        safe = ""
        while piece:
            given, piece = self._push_sheltered(piece) if self._is_sheltered else self._push_open(piece, is_counting)
            safe += given
        return safe

    def flush(self) -> str:
        """The text still held, when the sequence ended without a match."""
        held, self._held = self._held, ""
        return held

    def _push_open(self, piece: str, is_counting: bool) -> tuple[str, str]:
        """What is safe, and the rest of the piece, which is sheltered."""
        text = self._held + piece
        first = self._first_match(text) if is_counting else None
        shelter_start = self._shelter_start(text)
        if first is not None and (shelter_start is None or first[0] <= shelter_start):
            _, start, self.matched = first
            self._held = ""
            return text[:start], ""
        if shelter_start is not None:
            self._is_sheltered, self._held = True, ""
            return text[:shelter_start], text[shelter_start:]
        num_safe = len(text) - self._num_held(text)
        self._held = text[num_safe:]
        if self._shelter and self._shelter.is_first and text[:num_safe].strip():
            self._shelter = None
        return text[:num_safe], ""

    def _push_sheltered(self, piece: str) -> tuple[str, str]:
        """What is safe, and the rest of the piece, which is not sheltered."""
        assert self._shelter
        before, end, rest = (self._latest + piece).partition(self._shelter.end)
        self._is_sheltered = not end
        self._latest = "" if end else before[1 - len(self._shelter.end) :]
        return piece[: len(piece) - len(rest)], rest

    def _shelter_start(self, text: str) -> int | None:
        """Where the shelter's first marker has ended."""
        if not self._shelter:
            return None
        before, begin, _ = text.partition(self._shelter.begin)
        is_found = begin and not (self._shelter.is_first and before.strip())
        return len(before) + len(begin) if is_found else None

    def _first_match(self, text: str) -> tuple[int, int, str] | None:
        """Its end, its start and the stop string. What is held has been looked through: a match ends after it."""
        num_held = len(self._held)
        starts = [(text.find(stop, max(0, num_held - len(stop) + 1)), stop) for stop in self._stops]
        return min(((start + len(stop), start, stop) for start, stop in starts if start >= 0), default=None)

    def _num_held(self, text: str) -> int:
        """Length of the longest end of the text that begins a stop string or a shelter."""
        markers = [*self._stops, self._shelter.begin] if self._shelter else self._stops
        longest = max((len(marker) for marker in markers), default=1) - 1
        for num in range(min(longest, len(text)), 0, -1):
            if any(marker.startswith(text[-num:]) for marker in markers):
                return num
        return 0
