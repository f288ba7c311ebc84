"""Whether there is room on disk, as far as the last look for it tells: a look at thousands of folders takes long. Touches no files.

A look that found none counts for a moment, for all who come and all who wait: none of them looks at everything once more.
"""

import time
from typing import NamedTuple

LOOK_S = 0.1  # that a look counts, at the least
LOOK_SHARE = 4  # or so many times as long as it took


class DiskFull(Exception):
    """There will never be room."""


class DiskBusy(Exception):
    """There is none now."""


class _Found(NamedTuple):
    began: float = 0.0  # when it was looked, by the monotonic clock
    until: float = 0.0
    num_held: int = 0  # bytes in use
    num_coming: int = 0  # and of downloads under way


class DiskRoom:
    """Any thread may call this. Looks are made by one at a time."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.pause_s = LOOK_S  # until the next look of those who wait
        self._found = _Found()
        self._changed = 0.0  # when there was more room than before

    def check(self, num_bytes: int, asked: float, has_waited: bool = False) -> None:
        """Raises DiskFull, and DiskBusy where there was no room for so much a moment ago.

        asked: when, by the monotonic clock; has_waited: before that. What was found since then counts though there may be more by now,
        and for who has waited all that was found a moment ago: of many who wait each would else look once more after the other."""
        if num_bytes > self.max_bytes:
            raise DiskFull(f"it may take {num_bytes} bytes on disk, more than adapters.disk_bytes ({self.max_bytes})")
        found = self._found
        is_new = time.monotonic() < found.until and (has_waited or self._changed < found.began)
        if (is_new or asked < found.began) and num_bytes > self.max_bytes - found.num_held - found.num_coming:
            raise self.busy(num_bytes, found.num_held, found.num_coming)

    def looked(self, began: float, num_held: int, num_coming: int) -> None:
        """There was no room beside these bytes, as a look found that began then."""
        ended = time.monotonic()
        self.pause_s = max(LOOK_S, LOOK_SHARE * (ended - began))
        self._found = _Found(began, ended + self.pause_s, num_held, num_coming)

    def changed(self) -> None:
        """There may be more."""
        self._changed = time.monotonic()

    def busy(self, num_bytes: int, num_held: int, num_coming: int) -> DiskBusy:
        return DiskBusy(
            f"there is no room for {num_bytes} bytes on disk now: of adapters.disk_bytes ({self.max_bytes}) adapters in use or pinned "
            f"take {num_held} and downloads under way {num_coming}"
        )
