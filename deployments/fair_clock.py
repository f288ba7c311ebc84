"""What an adapter that always waits would have been served by now, were all served alike: where those that come anew begin.

A virtual clock, as of fair queueing, in tokens divided by weight: a computed token advances it by the share of one adapter of weight 1.
So ever new adapters, each of which has its turn before those that are always here, begin ahead of these as soon as they got less than
their share; what these are served then, they catch up by, and it does not advance. So they get about half of their share at the least,
and more the more adapters there are. Nor does it lag behind the least served of those that wait when one begins to: what others did not
want was no share of theirs.
"""

import math

MIN_HEAD_START, MAX_HEAD_START = 64, 512  # tokens


class FairClock:
    def __init__(self) -> None:
        self.now = 0.0
        self._weight = 0.0  # of all adapters that have something to compute
        self._num_adapters = 0

    def count(self, weight: float) -> None:
        """An adapter has something to compute from now on."""
        self._num_adapters += 1
        self._weight += weight

    def discount(self, weight: float) -> None:
        """It has no more."""
        self._num_adapters -= 1
        self._weight = self._weight - weight if self._num_adapters else 0.0  # so that errors of rounding don't add up

    def head_start(self, num_prompt: int, weight: float) -> float:
        """Of an adapter of the weight, before the clock, when so long a prompt comes: with its tokens, it is where others are. Those who
        are always here had better wait for it than halve its pace; but not for a very long one, nor the longer the less it weighs."""
        mean = self._weight / self._num_adapters if self._num_adapters else weight
        return min(max(num_prompt, MIN_HEAD_START), MAX_HEAD_START) / max(weight, mean)

    def advance(self, before: float, after: float, began: float, weight: float) -> None:
        """An adapter was served so much before and after a step, or before and after it was taken back. What counts is its head start, up
        to where it began, and what it has beyond the clock: in between, it catches up."""
        low, high = min(before, after), max(before, after)
        counted = max(min(high, began) - low, 0.0) + max(high - max(low, began, self.now), 0.0)
        if self._num_adapters:
            self.now += math.copysign(counted, after - before) * weight / self._weight

    def catch_up(self, level: float) -> None:
        self.now = max(self.now, level)
