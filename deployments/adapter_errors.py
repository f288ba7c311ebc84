"""What the disk or a library raises, as the error of one adapter. Knows neither what was tried nor where."""

import contextlib
import logging
import traceback
from collections.abc import Iterator

from loray.deployments.disk_room import DiskBusy, DiskFull
from loray.deployments.errors import AdapterFailed, AdapterNotFound, LorayError, Overloaded

logger = logging.getLogger("ray.serve.loray")


@contextlib.contextmanager
def only_loray_errors(name: str) -> Iterator[None]:
    """name: the adapter's."""
    try:
        yield
    except LorayError:
        raise
    except Exception as error:  # the disk's, or a library's that no source foresaw; its text may quote what was sent
        logger.error("adapter %s: %s\n%s", name, type(error).__name__, "".join(traceback.format_tb(error.__traceback__)))
        reason = (isinstance(error, OSError) and error.strerror) or type(error).__name__
        raise AdapterFailed(f"adapter {name!r}: {reason}") from None


@contextlib.contextmanager
def told_when_full(name: str) -> Iterator[None]:
    """name: the adapter's."""
    try:
        yield
    except DiskFull as error:
        raise AdapterFailed(f"adapter {name!r}: {error}") from None
    except DiskBusy as error:
        raise Overloaded(f"adapter {name!r}: {error}; try again") from None


@contextlib.contextmanager
def was_there() -> Iterator[None]:
    """Only what a source says when it is asked first means that there is no such adapter any more."""
    try:
        yield
    except AdapterNotFound as error:
        raise AdapterFailed(f"{error.message}, but was a moment ago; try again later") from None
