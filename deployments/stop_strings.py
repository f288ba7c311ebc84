"""Finds stop strings in text that comes in pieces. Knows neither tokens nor requests."""


class StopStrings:
    """Gives text out once it can't be part of a stop string any more.

    The stop string that ends first wins, of those the longest; so the way the text is cut into pieces does not matter.
    """

    def __init__(self, stops: list[str]) -> None:
        self._stops = stops
        self._held = ""
        self.matched = ""  # the stop string that was found

    def push(self, piece: str) -> str:
        """The text that is safe to give out; after a match, what stood before it."""
        assert not self.matched, "no text comes after a stop string"
        text = self._held + piece
        first = self._first_match(text)
        if first is not None:
            start, self.matched = first
            self._held = ""
            return text[:start]
        num_held = self._num_held(text)
        self._held = text[len(text) - num_held :]
        return text[: len(text) - num_held]

    def flush(self) -> str:
        """The text still held, when the sequence ended without a match."""
        held, self._held = self._held, ""
        return held

    def _first_match(self, text: str) -> tuple[int, str] | None:
        starts = [(text.find(stop), stop) for stop in self._stops]
        found = [(start + len(stop), start, stop) for start, stop in starts if start >= 0]
        if not found:
            return None
        _, start, stop = min(found)
        return start, stop

    def _num_held(self, text: str) -> int:
        """Length of the longest end of the text that begins a stop string."""
        longest = max((len(stop) for stop in self._stops), default=1) - 1
        for num in range(min(longest, len(text)), 0, -1):
            if any(stop.startswith(text[-num:]) for stop in self._stops):
                return num
        return 0
