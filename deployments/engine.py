"""Runs the scheduler against the ranks, one step ahead, in one thread. Knows neither Ray nor text.

Everything else reaches the engine through its inbox; tokens leave through the token channel. Only this thread touches the
scheduler, so there are no locks.
"""

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Collection
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from typing import Protocol, TypeVar

from loray.cluster.channel import Address
from loray.cluster.host_loads import Prepared
from loray.deployments.adapter_tiers import AdapterTiers
from loray.deployments.adapters import Adapter
from loray.deployments.deadlines import Deadlines
from loray.deployments.engine_stats import EngineCounts, engine_stats
from loray.deployments.errors import AdapterChanged, AdapterFailed, DeadlineExceeded, LorayError
from loray.deployments.outcomes import failures, outcomes
from loray.deployments.plan import Plan
from loray.deployments.queue_limits import QueueLimits, check_admission
from loray.deployments.rank_grammars import RankGrammars
from loray.deployments.request import GenerationRequest, TokenEvent
from loray.deployments.scheduler import Scheduler
from loray.deployments.sequence import Ending, Sequence
from loray.deployments.step_pace import StepPace
from loray.deployments.token_channel import TokenSender
from loray.models.step import Step, StepResult

T = TypeVar("T")

STEPS_IN_FLIGHT = 2  # one that runs, one that waits for it
IDLE_WAIT_MS = 1000
NUM_PREFETCHED = 16  # adapters that are asked for again, in the order of their turns, while there was no room for them
ABORTED = "aborted"


class Steps(Protocol):
    """The engine's way to the ranks."""

    def send(self, step: Step) -> None: ...
    def receive(self, timeout_ms: int) -> StepResult | None: ...
    def wake(self) -> None:
        """A waiting receive comes back with None. Any thread may call this."""
        ...


class Engine:
    def __init__(self, scheduler: Scheduler, tiers: AdapterTiers, steps: Steps, eos_ids: Collection[int], limits: QueueLimits) -> None:
        self._scheduler = scheduler
        self._tiers = tiers
        self._steps = steps
        self._eos_ids = frozenset(eos_ids)
        self._limits = limits
        self._tokens = TokenSender()
        self._inbox: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._sequences: dict[str, Sequence] = {}
        self._on_end: dict[str, Callable[[Ending], object]] = {}
        self._grammars = RankGrammars()
        self._deadlines = Deadlines()
        self._in_flight: deque[Plan] = deque()
        self._pace = StepPace()
        self._outgoing: list[tuple[Address, TokenEvent]] = []
        self._num_arrived = 0
        self._counts = EngineCounts()
        self._last_progress = time.monotonic()

    # Called from any thread.

    def submit(
        self,
        request: GenerationRequest,
        adapter: Adapter | None,
        reply: Address,
        on_end: Callable[[Ending], object],
        on_read: Callable[[], object] = lambda: None,
    ) -> None:
        """Every submitted request ends in a last TokenEvent to `reply`, unless aborted; then `on_end` is called, in the engine's thread, as
        `on_read` is when the adapter's files are in memory."""
        self._post(lambda: self._accept(request, adapter, reply, on_end, on_read))

    def refuse(self, request_id: str, error: LorayError, reply: Address) -> None:
        """Answer a request that ended before it reached the scheduler."""
        self._post(lambda: self._outgoing.append((reply, TokenEvent(request_id, error=type(error).__name__, message=error.message))))

    def acknowledge(self, request_id: str, reply: Address) -> None:
        """Tell whoever waits that the request is in good hands, though it takes its time to reach the scheduler."""
        self._post(lambda: self._outgoing.append((reply, TokenEvent(request_id))))

    def abort(self, request_id: str) -> None:
        self._post(lambda: self._abort(request_id))

    def prepared(self, prepared: Prepared) -> None:
        """All ranks are through with reading an adapter into host memory, or with compiling a grammar."""
        self._post(lambda: self._take_prepared(prepared))

    def call(self, work: Callable[[AdapterTiers], T]) -> Future[T]:
        """What `work` answers, or raises, in the engine's thread between two steps."""
        future: Future[T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(work(self._tiers))
            except Exception as error:  # the caller's to handle
                future.set_exception(error)
            if self._tiers.has_new_pins:
                self._fail_displaced()

        self._post(run)
        return future

    def stats(self) -> dict[str, float]:
        """Numbers for people and autoscalers; each is read without a lock and may be a step old."""
        return engine_stats(self._scheduler, self._tiers, self._counts)

    def seconds_stalled(self) -> float:
        """How long steps have been out without any coming back; 0 when nothing is out."""
        return time.monotonic() - self._last_progress if self._in_flight else 0.0

    def start(self, on_failure: Callable[[str], None]) -> None:
        def run() -> None:
            try:
                while True:
                    self._turn()
            except Exception as error:  # whatever it is, the replica can't go on
                on_failure(f"the engine failed: {error!r}")
                raise

        threading.Thread(target=run, name="engine", daemon=True).start()

    # Called from the engine's thread alone.

    def _post(self, command: Callable[[], None]) -> None:
        self._inbox.put(command)
        self._steps.wake()

    def _turn(self) -> None:
        self._read_inbox()
        for address in self._tokens.lost():
            self._abort_all(address)
        self._end_late(time.monotonic())
        wanted = self._scheduler.waiting.next_adapters(NUM_PREFETCHED)
        self._tiers.host.want_again(adapter for adapter in wanted if not adapter.is_ready)
        seconds_to_plan = self._seconds_to_plan()
        while len(self._in_flight) < STEPS_IN_FLIGHT and not seconds_to_plan and self._send_next():
            seconds_to_plan = self._seconds_to_plan()
        self._flush()
        if result := self._steps.receive(self._wait_ms(seconds_to_plan)):
            self._complete(result)
            self._flush()

    def _read_inbox(self) -> None:
        while True:
            try:
                command = self._inbox.get_nowait()
            except Empty:
                return
            command()

    def _seconds_to_plan(self) -> float:
        """How long the next step waits for requests that may come while the one before runs."""
        if not self._in_flight:
            return 0.0
        return max(0.0, self._last_progress + self._pace.wait_s(self._in_flight[0]) - time.monotonic())

    def _send_next(self) -> bool:
        """The next step, or False when there is nothing to do."""
        plan = self._scheduler.schedule()
        if self._scheduler.has_displaced:
            self._fail_displaced()
        orders = *self._tiers.host.take_orders(), self._tiers.table.take_freed_pages(), *self._grammars.take_orders()
        if plan is None and not any(orders):
            return False
        plan = plan or Plan()  # orders ride in a step, and wait for no other
        if not self._in_flight:
            self._last_progress = time.monotonic()
        self._counts.num_steps += 1
        self._in_flight.append(plan)
        self._steps.send(Step(self._counts.num_steps, list(plan.loads.values()), plan.admissions, list(plan.rows.values()), *orders))
        return True

    def _complete(self, result: StepResult) -> None:
        plan, began = self._in_flight.popleft(), self._last_progress
        self._last_progress = time.monotonic()
        self._pace.took(plan, self._last_progress - began)
        loaded = [adapter for index, adapter in enumerate(plan.loads) if index not in result.failed_loads]
        self._counts.num_pool_loads += len(loaded)
        self._counts.pool_load_seconds += result.load_seconds if loaded else 0.0
        for adapter in loaded:
            adapter.pool_use.num_loads += 1
            adapter.pool_use.load_seconds += result.load_seconds / len(loaded)
        for index, reason in result.failed_loads.items():
            self._fail_adapter(list(plan.loads)[index], AdapterFailed(reason))
        for sequence, error in failures(plan, result).items():
            self._fail(sequence, error)
        fields = outcomes(plan, result)
        for sequence in self._scheduler.complete(plan, result.token_ids, self._eos_ids):
            if sequence.request.pooling:
                self._counts.num_embeddings += 1
            else:
                self._counts.num_tokens += 1
            self._tell(sequence, finish_reason=sequence.finish_reason, **fields[sequence])
            if sequence.finish_reason:
                self._forget(sequence)

    def _accept(
        self,
        request: GenerationRequest,
        adapter: Adapter | None,
        reply: Address,
        on_end: Callable[[Ending], object],
        on_read: Callable[[], object],
    ) -> None:
        if first := self._on_end.get(request.request_id):  # Serve calls again when it can't tell whether a call arrived: they end together
            self._on_end[request.request_id] = lambda ending: (first(ending), on_end(ending))
            return
        sequence = Sequence(request.with_stop_ids(self._eos_ids), adapter, reply, self._num_arrived)
        self._num_arrived += 1
        if not self._tokens.knows(reply):  # a new ingress, perhaps in place of one that is gone
            self._tokens.keep({other.reply for other in self._sequences.values()})
        self._sequences[request.request_id] = sequence
        self._on_end[request.request_id] = on_end
        try:
            check_admission(sequence, self._scheduler, self._tiers, self._limits)
        except LorayError as refusal:
            sequence.is_finished = True
            return self._end_with(sequence, refusal)
        self._grammars.want(sequence)
        self._scheduler.add(sequence)
        if sequence.deadline < math.inf:
            self._deadlines.add(request.request_id, sequence.deadline)
        if sequence.adapter:
            self._tiers.want(sequence.adapter, on_read)
        self._tell(sequence, version=sequence.adapter.version if sequence.adapter else "")

    def _abort(self, request_id: str) -> None:
        sequence = self._sequences.get(request_id)
        if sequence:
            self._scheduler.finish(sequence)
            self._forget(sequence, ABORTED)

    def _abort_all(self, reply: Address) -> None:
        """Their ingress is gone, and so are the clients behind it."""
        for sequence in [s for s in self._sequences.values() if s.reply == reply]:
            self._abort(sequence.request.request_id)

    def _fail_adapter(self, adapter: Adapter, error: AdapterFailed) -> None:
        """The ranks could not read it: end its requests, and them alone."""
        self._scheduler.adapters.discard(adapter)
        self._scheduler.has_displaced = True  # if it is pinned, it takes host memory again
        for sequence in [s for s in self._sequences.values() if s.adapter is adapter]:
            self._fail(sequence, error)

    def _end_late(self, now: float) -> None:
        """Ends the requests whose deadline has come, wherever they are."""
        for request_id in self._deadlines.pop_due(now):
            sequence = self._sequences.get(request_id)
            if sequence and sequence.deadline <= now:  # else another of the same id
                self._fail(sequence, DeadlineExceeded(f"{sequence.num_output} tokens were generated"))
        self._deadlines.forget_ended(self._sequences)

    def _wait_ms(self, seconds_to_plan: float) -> int:
        """How long nothing may happen before a turn has something to do."""
        moments = self._deadlines.seconds_left(time.monotonic()), seconds_to_plan or None
        return math.ceil(min([IDLE_WAIT_MS, *(1000 * seconds for seconds in moments if seconds is not None)]))

    def _fail(self, sequence: Sequence, error: LorayError) -> None:
        """Ends this one, and frees what it has."""
        if not sequence.is_finished:
            self._scheduler.finish(sequence)
            self._end_with(sequence, error)

    def _fail_displaced(self) -> None:
        """Those who wait, and have no room any more beside what has been pinned since."""
        self._tiers.has_new_pins = self._scheduler.has_displaced = False
        for adapter in {s.adapter for s in self._sequences.values() if s.adapter and not s.adapter.page_ids}:
            try:
                self._tiers.check(adapter)
            except AdapterFailed as refusal:
                for sequence in [s for s in self._sequences.values() if s.adapter is adapter]:
                    self._fail(sequence, refusal)

    def _end_with(self, sequence: Sequence, error: LorayError) -> None:
        self._tell(sequence, error=type(error).__name__, message=error.message, num_before=sequence.num_output)
        self._forget(sequence, type(error).__name__, error.message)

    def _tell(self, sequence: Sequence, **fields: object) -> None:
        self._outgoing.append((sequence.reply, TokenEvent(sequence.request.request_id, **fields)))  # type: ignore[arg-type]

    def _forget(self, sequence: Sequence, error: str = "", reason: str = "") -> None:
        self._on_end.pop(sequence.request.request_id)(sequence.ending(error, reason))
        del self._sequences[sequence.request.request_id]
        self._grammars.release(sequence)
        if sequence.adapter:
            self._tiers.free_unused(sequence.adapter)

    def _take_prepared(self, prepared: Prepared) -> None:
        if prepared.grammar:
            self._grammars.arrived(prepared.grammar, prepared.num_bytes, prepared.error)
            self._scheduler.waiting.wake_loaded()  # so that their adapters are asked for at once
            self._scheduler.has_displaced = True  # those may have left, and find no room any more
        elif prepared.error:
            adapter, reason = self._tiers.failed(prepared.copy, prepared.error, prepared.is_changed)
            self._fail_adapter(adapter, AdapterChanged(reason) if prepared.is_changed else AdapterFailed(reason))
        else:
            self._counts.num_host_loads += 1
            self._counts.host_load_seconds += prepared.seconds
            self._tiers.arrived(prepared.copy, prepared.num_bytes, prepared.seconds)

    def _flush(self) -> None:
        if self._outgoing:
            self._tokens.send(self._outgoing)
            self._outgoing.clear()
