"""Makes of what an answer must look like a grammar that the ranks follow. Knows neither requests nor ranks.

Each is compiled here first, though the ranks do it anew: xgrammar can't be interrupted, so it is tried in processes of their own
(grammar_worker), which are killed when they take too long or too much memory."""

import asyncio
import threading
import time
import zlib
from collections import OrderedDict, deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import msgspec

from loray.deployments.config import GrammarArgs
from loray.deployments.errors import InvalidRequest, Overloaded
from loray.deployments.grammar_worker import LOST, Job, Outcome, Start
from loray.deployments.worker_process import WorkerLimits, WorkerLost, WorkerProcess, WorkerTooSlow

GrammarKind = Literal["json_object", "json_schema", "regex", "ebnf", "structural_tag"]
WORKER = "loray.deployments.grammar_worker"
NUM_WORKERS = 2  # one for what takes long leaves one to the others
QUICK_S = 1.0  # for each grammar, while another takes long
GRACE_S = 5.0  # a worker keeps to the time by itself; one that does not is killed after so long
MAX_PENDING = 64  # grammars that are being compiled or wait for it
REMEMBER_FAILURE_S = 60.0  # what took too long once is not tried again for so long
LEFT_S = 1.0  # a grammar that nobody waits for any more may take so long yet: starting another process takes longer
MAX_RULE_BYTES = 2 << 20  # compressed, as they travel with a request; 128 tools have 0.3 MiB
REFUSAL_BYTES = 1024  # of the cache, beside the text


@dataclass(frozen=True, slots=True)
class GrammarSpec:
    """What an answer must look like, as the caller wrote it."""

    kind: GrammarKind
    text: str = ""  # a JSON schema, a regular expression, a grammar in EBNF, a structural tag in JSON; "" for json_object


@dataclass(frozen=True, slots=True)
class _Result:
    rules: bytes = b""  # as `Sampling.grammar` wants them
    refusal: str = ""
    until: float = float("inf")  # seconds of the monotonic clock


@dataclass(slots=True, eq=False)
class _Pending:
    """A grammar that is being compiled or waits for it."""

    spec: GrammarSpec
    num_waiting: int = 0
    worker: WorkerProcess | None = None  # while it is being compiled
    future: "Future[_Result]" = field(default_factory=Future)


class Grammars:
    """For ranks that serve the model of the same folder."""

    def __init__(self, model_folder: Path | None, trust_remote_code: bool, args: GrammarArgs) -> None:
        self._args = args
        limits = WorkerLimits(args.compile_timeout_s + GRACE_S, int(args.max_compile_bytes))
        start = msgspec.msgpack.encode(Start(str(model_folder or ""), trust_remote_code))
        self._threads = ThreadPoolExecutor(NUM_WORKERS, "grammars")
        self._lock = threading.Lock()  # over all below, which the threads of the pool touch too
        self._idle = [WorkerProcess(WORKER, limits, start) for _ in range(NUM_WORKERS)]  # as many as threads, so that each finds one
        self._pending: dict[GrammarSpec, _Pending] = {}
        self._slow: deque[_Pending] = deque()  # a short try was not enough for them
        self._is_lane_taken = False
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
        if isinstance(result, _Pending):
            result = await self._wait(result)
        if result.refusal:
            raise InvalidRequest(f"{param}: {result.refusal}", param)
        return result.rules

    def close(self) -> None:
        """Ends the processes once they are idle."""
        with self._lock:
            for pending in self._pending.values():
                pending.future.cancel()
        self._threads.shutdown()
        for worker in self._idle:
            worker.stop()

    def _submit(self, spec: GrammarSpec) -> _Pending | _Result:
        """A pending one has one more who waits for it."""
        with self._lock:
            known = self._cache.get(spec)
            if known:
                return known
            if spec not in self._pending:
                if len(self._pending) >= MAX_PENDING:
                    raise Overloaded(f"{MAX_PENDING} grammars are being compiled already; try again")
                self._pending[spec] = _Pending(spec)
                self._threads.submit(self._run, self._pending[spec])
            self._pending[spec].num_waiting += 1
            return self._pending[spec]

    async def _wait(self, pending: _Pending) -> _Result:
        try:
            return await asyncio.shield(asyncio.wrap_future(pending.future))  # others may wait for it too
        finally:
            with self._lock:
                pending.num_waiting -= 1
                is_left = not pending.num_waiting and not pending.future.done()
                if is_left and pending.future.cancel():
                    del self._pending[pending.spec]
                elif is_left:
                    asyncio.get_running_loop().call_later(LEFT_S, self._give_up, pending)

    def _give_up(self, pending: _Pending) -> None:
        """Unless somebody wants it again, or it is done."""
        with self._lock:
            if not pending.num_waiting and self._pending.get(pending.spec) is pending:
                del self._pending[pending.spec]
                if pending.worker:
                    pending.worker.kill()

    def _run(self, pending: _Pending) -> None:
        """In a thread of the pool. One at a time may take all its time; beside it others have a short try, and if that is not enough wait
        for the same thread."""
        if not pending.future.set_running_or_notify_cancel():
            return
        turn: _Pending | None = pending
        with self._lock:
            has_lane = self._claims_lane()
        while turn:
            self._compile(turn, has_lane)
            with self._lock:
                has_lane = has_lane or self._claims_lane()
                turn = self._slow.popleft() if has_lane and self._slow else None
                self._is_lane_taken = not has_lane or turn is not None

    def _claims_lane(self) -> bool:
        is_free, self._is_lane_taken = not self._is_lane_taken, True
        return is_free

    def _compile(self, pending: _Pending, has_lane: bool) -> None:
        timeout_s = self._args.compile_timeout_s
        try:
            result = self._ask(pending, timeout_s if has_lane else min(QUICK_S, timeout_s))
        except Exception as error:  # no worker can be started; who waits is told
            with self._lock:
                self._forget(pending)
            pending.future.set_exception(error)
            return
        with self._lock:
            if not result and not has_lane:
                self._slow.append(pending)
                return
            result = result or _lost(f"takes more than {timeout_s:g} s to compile (grammars.compile_timeout_s)")
            if self._forget(pending):
                self._cache.put(pending.spec, result)
        pending.future.set_result(result)

    def _forget(self, pending: _Pending) -> bool:
        """Whether it was still wanted; else it was given up, and its result says nothing."""
        is_wanted = self._pending.get(pending.spec) is pending
        if is_wanted:
            del self._pending[pending.spec]
        return is_wanted

    def _ask(self, pending: _Pending, limit_s: float) -> _Result | None:
        """None: it takes longer."""
        with self._lock:
            self._idle.sort(key=lambda worker: worker.is_running)
            worker = self._idle.pop()
        try:
            worker.start()
            with self._lock:
                if self._pending.get(pending.spec) is not pending:
                    return _Result(refusal="nobody waits for it")
                pending.worker = worker
            try:
                answer = worker.ask(msgspec.msgpack.encode(Job(pending.spec.kind, pending.spec.text, limit_s)))
            finally:
                with self._lock:
                    pending.worker = None  # who gives it up from now on would kill the next one's
            outcome = msgspec.msgpack.decode(answer, type=Outcome)
            return None if outcome.is_too_slow else self._result(outcome)
        except WorkerTooSlow:
            return None
        except WorkerLost:
            return _lost(LOST)
        finally:
            with self._lock:
                self._idle.append(worker)

    def _result(self, outcome: Outcome) -> _Result:
        if outcome.refusal:
            return _Result(refusal=outcome.refusal)
        if outcome.num_bytes > self._args.max_compiled_bytes:
            size = f"{outcome.num_bytes} bytes when compiled"
            return _Result(refusal=f"has {size}, more than grammars.max_compiled_bytes, {self._args.max_compiled_bytes}")
        rules = zlib.compress(outcome.rules.encode())
        if len(rules) > MAX_RULE_BYTES:
            return _Result(refusal=f"has rules of {len(rules)} bytes, more than {MAX_RULE_BYTES}")
        return _Result(rules)


def _lost(refusal: str) -> _Result:
    return _Result(refusal=refusal, until=time.monotonic() + REMEMBER_FAILURE_S)


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
    return REFUSAL_BYTES + 4 * len(spec.text) + len(result.rules)
