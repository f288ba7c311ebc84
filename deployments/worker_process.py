"""A process for work that may never end, fill the memory or crash: then it is killed, and nothing else suffers. Knows not what the work is.

Run as `python -m MODULE FD`. Its parent kills it when it takes too long; without a parent it ends by itself."""

import math
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec

from loray.deployments.errors import Incomplete

START_S = 120.0  # to import what takes torch along

Work = Callable[[bytes], bytes]


class WorkerLost(Exception):
    """It did not survive its work."""


class WorkerTooSlow(WorkerLost):
    """It was killed."""


class WorkerLimits(msgspec.Struct, frozen=True):
    timeout_s: float
    max_memory_bytes: int  # beside what the process takes when it is ready


class WorkerProcess:
    """The parent's end, for one thread at a time. Started with its first job, and again after each that it did not survive."""

    def __init__(self, module: str, limits: WorkerLimits, start: bytes) -> None:
        self._module = module
        self._limits = limits
        self._start = start
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Unless it runs already. Raises Incomplete."""
        if not self.is_running:
            self._launch()

    def ask(self, job: bytes) -> bytes:
        """What the worker makes of it. Raises WorkerLost, and Incomplete where no worker can be started."""
        self.start()
        try:
            self._connection.send_bytes(job)
            if self._connection.poll(self._limits.timeout_s):
                return self._connection.recv_bytes()
        except (EOFError, OSError) as error:
            self.stop()
            raise WorkerLost from error
        self.stop()
        raise WorkerTooSlow

    def kill(self) -> None:
        """From any thread: who waits for an answer is told that the worker is lost."""
        process = self._process
        if process:
            process.kill()

    def stop(self) -> None:
        if self._process:
            self._connection.close()
            self._process.kill()
            self._process.wait()
            self._process = None

    def _launch(self) -> None:
        self.stop()
        self._connection, theirs = Pipe()
        command = [sys.executable, "-m", self._module, str(theirs.fileno())]
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "CUDA_VISIBLE_DEVICES": ""}
        self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()], env=env, stdin=subprocess.DEVNULL)
        theirs.close()
        try:
            self._connection.send_bytes(msgspec.msgpack.encode(self._limits))
            self._connection.send_bytes(self._start)
            if self._connection.poll(START_S):
                self._connection.recv_bytes()
                return
        except (EOFError, OSError):
            pass
        self.stop()
        raise Incomplete(f"{self._module} does not start; the ingress replica's log says why")


def work_for_parent(prepare: Callable[[bytes], Work]) -> None:
    """The worker's end: makes itself ready with the parent's first words, then does one job after another until the parent is gone."""
    connection = Connection(int(sys.argv[1]))
    limits = msgspec.msgpack.decode(connection.recv_bytes(), type=WorkerLimits)
    work = prepare(connection.recv_bytes())
    _limit_memory(limits.max_memory_bytes)
    connection.send_bytes(b"")  # ready
    while True:
        try:
            job = connection.recv_bytes()
        except EOFError:
            return
        signal.alarm(math.ceil(limits.timeout_s) + 1)  # ends this process if nobody is left to do it
        connection.send_bytes(work(job))
        signal.alarm(0)


def _limit_memory(max_bytes: int) -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + max_bytes
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
