"""Wakes a thread that waits on sockets, from any other thread."""

import contextlib
import os


class Waker:
    def __init__(self) -> None:
        self.fd, self._write_fd = os.pipe()
        os.set_blocking(self.fd, False)
        os.set_blocking(self._write_fd, False)

    def wake(self) -> None:
        """`fd` is readable from now on. Any thread may call this."""
        with contextlib.suppress(BlockingIOError):  # the pipe is full of wake-ups already
            os.write(self._write_fd, b"\0")

    def clear(self) -> None:
        with contextlib.suppress(BlockingIOError):  # nobody has called wake since
            while len(os.read(self.fd, 4096)) == 4096:
                pass
