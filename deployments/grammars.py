"""Compiles what an answer must look like into a grammar that the ranks follow. Knows neither requests nor ranks.

xgrammar can't be interrupted, so processes of their own do it (grammar_worker), which are killed when they take too long."""

import asyncio
import os
import subprocess
import sys
import threading
import time
import zlib
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing import Pipe
from pathlib import Path
from typing import Literal

import msgspec

from loray.deployments.config import GrammarArgs
from loray.deployments.errors import Incomplete, InvalidRequest, Overloaded
from loray.deployments.grammar_worker import Job, Outcome, Start

GrammarKind = Literal["json_object", "json_schema", "regex", "ebnf", "structural_tag"]
NUM_WORKERS = 2  # one that is stuck leaves one to the others
MAX_PENDING = 64  # grammars that are being compiled or wait for it
START_S = 120.0  # to import xgrammar, which takes torch along
REMEMBER_FAILURE_S = 60.0  # what took too long once is not tried again for so long
REFUSAL_BYTES = 1024  # of the cache, beside the text


@dataclass(frozen=True, slots=True)
class GrammarSpec:
    """What an answer must look like, as the caller wrote it."""

    kind: GrammarKind
    text: str = ""  # a JSON schema, a regular expression, a grammar in EBNF, a structural tag in JSON; "" for json_object


@dataclass(frozen=True, slots=True)
class _Result:
    compiled: bytes = b""
    refusal: str = ""
    until: float = float("inf")  # seconds of the monotonic clock


class WorkerLost(Exception):
    """It died or was killed over a grammar. Says why; never leaves this file."""


class Grammars:
    """For ranks that serve the model of the same folder."""

    def __init__(self, model_folder: Path | None, trust_remote_code: bool, args: GrammarArgs) -> None:
        self._args = args
        start = Start(str(model_folder or ""), trust_remote_code, int(args.max_compile_bytes), args.compile_timeout_s)
        self._threads = ThreadPoolExecutor(NUM_WORKERS, "grammars")
        self._lock = threading.Lock()  # over the three below, which the threads of the pool touch too
        self._idle = [_Worker(start) for _ in range(NUM_WORKERS)]  # as many as threads, so that each finds one
        self._pending: dict[GrammarSpec, Future[_Result]] = {}
        self._cache = _Cache(args.cache_bytes)

    async def compile(self, spec: GrammarSpec, param: str) -> bytes:
        """As `Sampling.grammar` wants it. `param` is what the API calls the field."""
        try:
            num_bytes = len(spec.text.encode())
        except UnicodeEncodeError as error:
            raise InvalidRequest(f"{param}: has half a character (a lone surrogate)", param) from error
        if num_bytes > self._args.max_text_bytes:
            raise InvalidRequest(f"{param}: has {num_bytes} bytes, more than grammars.max_text_bytes, {self._args.max_text_bytes}", param)
        result = self._submit(spec)
        if isinstance(result, Future):
            result = await asyncio.shield(asyncio.wrap_future(result))  # others may wait for it too
        if result.refusal:
            raise InvalidRequest(f"{param}: {result.refusal}", param)
        return result.compiled

    def close(self) -> None:
        """Ends the processes once they are idle."""
        self._threads.shutdown(cancel_futures=True)
        for worker in self._idle:
            worker.stop()

    def _submit(self, spec: GrammarSpec) -> "Future[_Result] | _Result":
        with self._lock:
            known = self._cache.get(spec)
            if known:
                return known
            if spec not in self._pending:
                if len(self._pending) >= MAX_PENDING:
                    raise Overloaded(f"{MAX_PENDING} grammars are being compiled already; try again")
                self._pending[spec] = self._threads.submit(self._run, spec)
            return self._pending[spec]

    def _run(self, spec: GrammarSpec) -> _Result:
        """In a thread of the pool."""
        with self._lock:
            self._idle.sort(key=lambda worker: worker.is_running)
            worker = self._idle.pop()
        result = None
        try:
            result = self._result(worker.compile(Job(spec.kind, spec.text)))
        except WorkerLost as loss:
            result = _Result(refusal=str(loss), until=time.monotonic() + REMEMBER_FAILURE_S)
        finally:
            with self._lock:
                self._idle.append(worker)
                del self._pending[spec]
                if result:
                    self._cache.put(spec, result)
        return result

    def _result(self, outcome: Outcome) -> _Result:
        if outcome.refusal:
            return _Result(refusal=outcome.refusal)
        if len(outcome.compiled) > self._args.max_compiled_bytes:
            size = f"{len(outcome.compiled)} bytes when compiled"
            return _Result(refusal=f"has {size}, more than grammars.max_compiled_bytes, {self._args.max_compiled_bytes}")
        return _Result(compiled=zlib.compress(outcome.compiled.encode()))


class _Cache:
    """The last used results, up to so many bytes."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._results: OrderedDict[GrammarSpec, _Result] = OrderedDict()

    def get(self, spec: GrammarSpec) -> _Result | None:
        result = self._results.get(spec)
        if result is None:
            return None
        if result.until < time.monotonic():
            self._drop(spec)
            return None
        self._results.move_to_end(spec)
        return result

    def put(self, spec: GrammarSpec, result: _Result) -> None:
        self._results[spec] = result
        self._num_bytes += _size(spec, result)
        while self._num_bytes > self._max_bytes:
            self._drop(next(iter(self._results)))

    def _drop(self, spec: GrammarSpec) -> None:
        self._num_bytes -= _size(spec, self._results.pop(spec))


def _size(spec: GrammarSpec, result: _Result) -> int:
    return REFUSAL_BYTES + 4 * len(spec.text) + len(result.compiled)


class _Worker:
    """One process, started with its first grammar and again after each that it did not survive."""

    def __init__(self, start: Start) -> None:
        self._start = start
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def compile(self, job: Job) -> Outcome:
        """Raises WorkerLost."""
        if not self.is_running:
            self._launch()
        timeout_s = self._start.timeout_s
        try:
            self._connection.send_bytes(msgspec.msgpack.encode(job))
            if self._connection.poll(timeout_s):
                return msgspec.msgpack.decode(self._connection.recv_bytes(), type=Outcome)
        except (EOFError, OSError) as error:
            self.stop()
            raise WorkerLost("the grammar compiler did not survive it: it is nested too deep or takes too much memory") from error
        self.stop()
        raise WorkerLost(f"takes more than {timeout_s:g} s to compile (grammars.compile_timeout_s)")

    def stop(self) -> None:
        if self._process:
            self._connection.close()
            self._process.kill()
            self._process.wait()
            self._process = None

    def _launch(self) -> None:
        self.stop()
        self._connection, theirs = Pipe()
        command = [sys.executable, "-m", "loray.deployments.grammar_worker", str(theirs.fileno())]
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "CUDA_VISIBLE_DEVICES": ""}
        self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()], env=env, stdin=subprocess.DEVNULL)
        theirs.close()
        try:
            self._connection.send_bytes(msgspec.msgpack.encode(self._start))
            if self._connection.poll(START_S):
                self._connection.recv_bytes()
                return
        except (EOFError, OSError):
            pass
        self.stop()
        raise Incomplete("the grammar compiler does not start; the ingress replica's log says why")
