"""Shows how far the long parts of a start are: a bar on a terminal, else a line of the log now and then."""

import logging
import sys
import time
from collections.abc import Iterator, Sequence
from typing import TypeVar

from tqdm import tqdm

logger = logging.getLogger("loray.progress")
REPORT_S = 5.0  # between two lines of the log

Item = TypeVar("Item")


def with_progress(items: Sequence[Item], doing: str, unit: str) -> Iterator[Item]:
    has_bar = sys.stderr.isatty()
    reported = time.monotonic()
    for index, item in enumerate(tqdm(items, desc=doing, unit=unit, file=sys.stderr, disable=not has_bar)):
        if not has_bar and time.monotonic() - reported >= REPORT_S:
            logger.info("%s: %d of %d %ss", doing, index, len(items), unit)
            reported = time.monotonic()
        yield item
