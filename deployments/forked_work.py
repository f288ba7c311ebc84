"""Work in a child that is forked for it: it starts at once with all that its parent has read, and may be killed. Knows not what it does."""

import ctypes
import math
import os
import select
import signal
import time
from collections.abc import Callable

PR_SET_PDEATHSIG = 1  # of Linux


class ChildLost(Exception):
    """It did not survive its work."""


class ChildTooSlow(Exception):
    """It was killed."""


def in_child(work: Callable[[], bytes], limit_s: float) -> bytes:
    """What it answers, which is never nothing. For processes of one thread."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        _answer(work, writer, limit_s)
    os.close(writer)
    try:
        answer = _read(reader, time.monotonic() + limit_s)
    finally:
        os.close(reader)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    if not answer:
        raise ChildLost
    return answer


def _answer(work: Callable[[], bytes], writer: int, limit_s: float) -> None:
    """Never returns."""
    try:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        signal.alarm(math.ceil(limit_s) + 1)  # where the parent was gone before
        with os.fdopen(writer, "wb") as pipe:
            pipe.write(work())
    finally:
        os._exit(0)


def _read(reader: int, deadline: float) -> bytes:
    parts: list[bytes] = []
    while select.select([reader], [], [], max(0.0, deadline - time.monotonic()))[0]:
        part = os.read(reader, 1 << 20)
        if not part:
            return b"".join(parts)
        parts.append(part)
    raise ChildTooSlow
