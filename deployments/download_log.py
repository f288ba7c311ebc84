"""Tells in the log how far a download is. Looks only at the sizes of the files that it writes."""

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

logger = logging.getLogger("ray.serve.loray")

INTERVAL_S = 4.0


@contextmanager
def logged(name: str, folder: Path, num_bytes: int) -> Iterator[None]:
    """A thread of its own tells, so that a download which stands still shows too."""
    started = time.monotonic()
    ended = threading.Event()

    def tell() -> None:
        while not ended.wait(INTERVAL_S):
            seconds = time.monotonic() - started
            logger.info("adapter %s: %d of %d bytes after %.0f s", name, _num_written(folder), num_bytes, seconds)

    logger.info("adapter %s: downloading %d bytes", name, num_bytes)
    teller = threading.Thread(target=tell, name="download-log", daemon=True)
    teller.start()
    try:
        yield
        logger.info("adapter %s: downloaded %d bytes in %.1f s", name, num_bytes, time.monotonic() - started)
    finally:
        ended.set()
        teller.join()


def _num_written(folder: Path) -> int:
    total = 0
    for file in folder.rglob("*"):
        with suppress(OSError):  # moved meanwhile
            total += file.stat().st_size if file.is_file() else 0
    return total
