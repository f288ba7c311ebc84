"""Reading adapters into the ranks' host memory and compiling grammars, beside the steps: what a rank does when it is told to, and how the
driver hears of it.

The orders ride in the steps, so every rank obeys them in the same order. How long reading takes differs from rank to rank: each says
when it is through, and an adapter or a grammar counts as there once all have said so.
"""

import logging
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import msgspec
import zmq

from loray.cluster.channel import Address, bind, connect
from loray.models.adapter_config import AdapterError, FilesChanged
from loray.models.step import HostCopy, Step, grammar_key

logger = logging.getLogger("loray.adapters")
NUM_READERS = 4  # adapters that one rank reads at once
NUM_COMPILERS = 2  # grammars that one rank compiles at once
COMPILER_NICENESS = 10  # the steps come first
COMPILER_STACK_BYTES = 64 << 20  # far more than the ingress gave: what is nested too deep must fail there
NO_COPY = HostCopy("", "")


class HostAdapters(Protocol):
    """Where a rank keeps them. Any thread may call this."""

    def prepare(self, path: str, signature: str) -> int: ...
    def drop(self, path: str, signature: str) -> None: ...


class HostGrammars(Protocol):
    """Likewise. What `prepare` answers are bytes."""

    def prepare(self, grammar: bytes) -> int: ...
    def drop(self, key: bytes) -> None: ...


class RankReport(msgspec.Struct, frozen=True, array_like=True):
    """One rank is through with one adapter, or one grammar."""

    rank: int
    copy: HostCopy
    num_bytes: int
    seconds: float
    error: str = ""  # "" = it is there
    grammar: bytes = b""  # its key; copy says nothing then
    is_changed: bool = False  # the files are not those that were asked for


class Prepared(msgspec.Struct, frozen=True):
    """All ranks are through with one adapter, or one grammar."""

    copy: HostCopy
    num_bytes: int  # of the rank that needs most
    seconds: float  # of the slowest
    error: str = ""
    grammar: bytes = b""  # as in RankReport
    is_changed: bool = False  # likewise


class HostLoader:
    """A rank's end."""

    def __init__(self, host: HostAdapters, grammars: HostGrammars, reports: Address, rank: int) -> None:
        self._host = host
        self._grammars = grammars
        self._rank = rank
        self._readers = ThreadPoolExecutor(NUM_READERS, "adapter-reader")
        self._compilers = ThreadPoolExecutor(NUM_COMPILERS, "grammar-compiler", _become_nice)
        self._socket = connect(zmq.PUSH, reports)
        self._sending = threading.Lock()  # a socket is for one thread at a time

    def prepare(self, step: Step) -> None:
        """Start reading and compiling what the step names. Called before it is executed."""
        for copy in step.prepares:
            self._readers.submit(self._prepare, copy)
        if step.grammars:
            usual = threading.stack_size(COMPILER_STACK_BYTES)  # of threads to come: the pool starts them now
            for grammar in step.grammars:
                self._compilers.submit(self._compile, grammar)
            threading.stack_size(usual)

    def drop(self, step: Step) -> None:
        """Forget what the step names. Called after it is executed: it may still load it into pages."""
        for copy in step.drops:
            self._host.drop(copy.path, copy.signature)
        for key in step.dropped_grammars:
            self._grammars.drop(key)

    def _prepare(self, copy: HostCopy) -> None:
        started = time.monotonic()
        num_bytes, error, is_changed = 0, "", False
        try:
            num_bytes = self._host.prepare(copy.path, copy.signature)
        except AdapterError as refusal:
            error, is_changed = str(refusal), isinstance(refusal, FilesChanged)
        except Exception as failure:  # a bug or a full memory must fail this adapter's requests, not leave them waiting
            logger.exception("could not read %s", copy.path)
            error = f"adapter {copy.path.rpartition('/')[2]!r} could not be read: {failure!r}"
        self._report(RankReport(self._rank, copy, num_bytes, time.monotonic() - started, error, is_changed=is_changed))

    def _compile(self, grammar: bytes) -> None:
        started = time.monotonic()
        num_bytes, error = 0, ""
        try:
            num_bytes = self._grammars.prepare(grammar)
        except Exception as failure:  # whoever asked for it must hear of it
            error = repr(failure)
        self._report(RankReport(self._rank, NO_COPY, num_bytes, time.monotonic() - started, error, grammar_key(grammar)))

    def _report(self, report: RankReport) -> None:
        with self._sending:
            self._socket.send(msgspec.msgpack.encode(report))


def _become_nice() -> None:
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), COMPILER_NICENESS)


class HostReports:
    """The driver's end: calls `on_prepared`, in a thread of its own, once every rank has spoken of an adapter or a grammar."""

    def __init__(self, node_ip: str, world_size: int) -> None:
        self._socket, self.address = bind(zmq.PULL, node_ip)
        self._world_size = world_size
        self._reports: dict[tuple[HostCopy, bytes], list[RankReport]] = {}

    def start(self, on_prepared: Callable[[Prepared], None]) -> None:
        threading.Thread(target=self._run, args=(on_prepared,), name="adapter-reports", daemon=True).start()

    def _run(self, on_prepared: Callable[[Prepared], None]) -> None:
        decoder = msgspec.msgpack.Decoder(RankReport)
        while True:
            report = decoder.decode(self._socket.recv())
            what = report.copy, report.grammar
            reports = self._reports.setdefault(what, [])
            reports.append(report)
            if len(reports) == self._world_size:
                del self._reports[what]
                error = next((one.error for one in reports if one.error), "")
                num_bytes, seconds = max(one.num_bytes for one in reports), max(one.seconds for one in reports)
                is_changed = any(one.is_changed for one in reports)
                on_prepared(Prepared(report.copy, num_bytes, seconds, error, report.grammar, is_changed))
