"""Runs the scheduler against the ranks, one step ahead, in one thread. Knows neither Ray nor text.

Everything else reaches the engine through its inbox; tokens leave through the token channel. Only this thread touches the
scheduler, so there are no locks.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Collection
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from typing import Protocol, TypeVar

import msgspec

from loray.cluster.channel import Address
from loray.cluster.host_loads import Prepared
from loray.deployments.adapter_tiers import AdapterTiers
from loray.deployments.adapters import Adapter
from loray.deployments.errors import AdapterFailed, InvalidRequest, LorayError, Overloaded
from loray.deployments.request import GenerationRequest, TokenEvent
from loray.deployments.scheduler import Plan, Scheduler
from loray.deployments.sequence import Sequence
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


class QueueLimits(msgspec.Struct, frozen=True):
    """Requests that may wait; beyond them one is answered with Overloaded."""

    max_waiting: int
    max_waiting_of_adapter: int


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
        self._on_end: dict[str, Callable[[str], object]] = {}
        self._in_flight: deque[Plan] = deque()
        self._outgoing: list[tuple[Address, TokenEvent]] = []
        self._num_arrived = 0
        self._num_steps = 0
        self._num_tokens = 0
        self._num_embeddings = 0
        self._num_host_loads = 0
        self._host_load_seconds = 0.0
        self._num_pool_loads = 0
        self._pool_load_seconds = 0.0
        self._last_progress = time.monotonic()

    # Called from any thread.

    def submit(self, request: GenerationRequest, adapter: Adapter | None, reply: Address, on_end: Callable[[str], object]) -> None:
        """Every submitted request ends in a last TokenEvent to `reply`, unless aborted; then `on_end` is called with the error's name,
        "aborted", or nothing when all went well."""
        self._post(lambda: self._accept(request, adapter, reply, on_end))

    def refuse(self, request_id: str, error: LorayError, reply: Address) -> None:
        """Answer a request that ended before it reached the scheduler."""
        self._post(lambda: self._outgoing.append((reply, TokenEvent(request_id, error=type(error).__name__, message=error.message))))

    def abort(self, request_id: str) -> None:
        self._post(lambda: self._abort(request_id))

    def prepared(self, prepared: Prepared) -> None:
        """All ranks are through with reading an adapter into host memory."""
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
        scheduler = self._scheduler
        return {
            "running": len(scheduler.running),
            "waiting": len(scheduler.waiting),
            "kv_blocks_used": scheduler.blocks.num_used,
            "kv_blocks_total": scheduler.blocks.num_blocks,
            "kv_blocks_cached": scheduler.blocks.num_cached,
            "adapter_references": scheduler.adapters.num_references,
            "adapters_resident": scheduler.adapters.num_resident,
            "adapter_pages_used": scheduler.adapters.num_used_pages,
            "adapter_pages_total": scheduler.adapters.num_pages,
            "adapter_evictions_gpu_total": scheduler.adapters.num_evictions,
            "adapter_host_bytes_used": self._tiers.host.num_bytes,
            "adapter_host_bytes_total": self._tiers.host.max_bytes,
            "adapters_in_host": self._tiers.host.num_adapters,
            "adapter_evictions_host_total": self._tiers.host.num_evictions,
            "adapter_loads_host_total": self._num_host_loads,
            "adapter_load_host_seconds_total": self._host_load_seconds,
            "adapter_loads_gpu_total": self._num_pool_loads,
            "adapter_load_gpu_seconds_total": self._pool_load_seconds,
            "preemptions_total": scheduler.num_preemptions,
            "prompt_tokens_total": scheduler.num_started_tokens,
            "prefix_cached_tokens_total": scheduler.num_cached_tokens,
            "prefix_hit_rate": scheduler.num_cached_tokens / max(scheduler.num_started_tokens, 1),
            "steps_total": self._num_steps,
            "generated_tokens_total": self._num_tokens,
            "embeddings_total": self._num_embeddings,
        }

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
        for adapter in self._scheduler.next_adapters(NUM_PREFETCHED):
            if not adapter.is_ready:
                self._tiers.host.want(adapter)
        while len(self._in_flight) < STEPS_IN_FLIGHT and self._send_next():
            pass
        self._flush()
        result = self._steps.receive(IDLE_WAIT_MS)
        if result:
            self._complete(result)
            self._flush()

    def _read_inbox(self) -> None:
        while True:
            try:
                command = self._inbox.get_nowait()
            except Empty:
                return
            command()

    def _send_next(self) -> bool:
        """The next step, or False when there is nothing to do."""
        plan = self._scheduler.schedule()
        prepares, drops = self._tiers.host.take_orders()
        freed_pages = self._tiers.table.take_freed_pages()
        if plan is None and not prepares and not drops and not freed_pages:
            return False
        plan = plan or Plan()  # orders ride in a step, and wait for no other
        if not self._in_flight:
            self._last_progress = time.monotonic()
        self._num_steps += 1
        self._in_flight.append(plan)
        self._steps.send(
            Step(self._num_steps, list(plan.loads.values()), plan.admissions, list(plan.rows.values()), prepares, drops, freed_pages)
        )
        return True

    def _complete(self, result: StepResult) -> None:
        plan = self._in_flight.popleft()
        self._last_progress = time.monotonic()
        self._num_pool_loads += len(plan.loads)
        self._pool_load_seconds += result.load_seconds
        for index, reason in result.failed_loads.items():
            self._fail_adapter(list(plan.loads)[index], reason)
        logprobs = dict(zip(plan.sampled, result.logprobs, strict=True))
        embeddings = dict(zip(plan.pooled, result.embeddings, strict=True))
        for sequence in self._scheduler.complete(plan, result.token_ids, self._eos_ids):
            if sequence in embeddings:
                self._num_embeddings += 1
                self._tell(sequence, embedding=embeddings[sequence], finish_reason=sequence.finish_reason)
            else:
                self._num_tokens += 1
                token_ids, logprob = sequence.token_ids[-1:], logprobs[sequence]
                self._tell(sequence, token_ids=token_ids, logprobs=[logprob], finish_reason=sequence.finish_reason)
            if sequence.finish_reason:
                self._forget(sequence)

    def _accept(self, request: GenerationRequest, adapter: Adapter | None, reply: Address, on_end: Callable[[str], object]) -> None:
        sequence = Sequence(request, adapter, reply, self._num_arrived)
        self._num_arrived += 1
        if not self._tokens.knows(reply):  # a new ingress, perhaps in place of one that is gone
            self._tokens.keep({other.reply for other in self._sequences.values()})
        self._sequences[request.request_id] = sequence
        self._on_end[request.request_id] = on_end
        try:
            self._check(sequence)
        except LorayError as refusal:
            sequence.is_finished = True
            return self._end_with(sequence, refusal)
        self._scheduler.add(sequence)
        if sequence.adapter:
            self._tiers.host.want(sequence.adapter)
        self._tell(sequence)

    def _check(self, sequence: Sequence) -> None:
        """Raises if this sequence could not wait, or never run, here."""
        scheduler = self._scheduler
        num_tokens = sequence.request.max_tokens
        if len(scheduler.waiting) >= self._limits.max_waiting:
            raise Overloaded(f"{len(scheduler.waiting)} requests are waiting already; try again")
        adapter_id = self._tiers.table.known(sequence.adapter).adapter_id if sequence.adapter else ""
        num_waiting = scheduler.num_waiting_of(adapter_id)
        if num_waiting >= self._limits.max_waiting_of_adapter:
            raise Overloaded(f"{num_waiting} requests of {adapter_id or 'the base model'} are waiting already; try again")
        if scheduler.blocks.num_needed(num_tokens) > scheduler.blocks.num_blocks:
            room = scheduler.blocks.num_blocks * scheduler.blocks.block_size
            what = "the input is" if sequence.request.pooling else "prompt and max_new_tokens are"
            raise InvalidRequest(f"{what} {num_tokens} tokens, more than the KV cache holds ({room})")
        if sequence.adapter:
            self._tiers.check(sequence.adapter)

    def _abort(self, request_id: str) -> None:
        sequence = self._sequences.get(request_id)
        if sequence:
            self._scheduler.finish(sequence)
            self._forget(sequence, ABORTED)

    def _abort_all(self, reply: Address) -> None:
        """Their ingress is gone, and so are the clients behind it."""
        for sequence in [s for s in self._sequences.values() if s.reply == reply]:
            self._abort(sequence.request.request_id)

    def _fail_adapter(self, adapter: Adapter, reason: str) -> None:
        """The ranks could not read it: end its requests, and them alone."""
        self._scheduler.adapters.discard(adapter)
        for sequence in [s for s in self._sequences.values() if s.adapter is adapter]:
            self._scheduler.finish(sequence)
            self._end_with(sequence, AdapterFailed(reason))

    def _fail_displaced(self) -> None:
        """Those who wait, and have no room any more beside what has been pinned since."""
        self._tiers.has_new_pins = False
        for sequence in [s for s in self._sequences.values() if s.adapter and not s.adapter.page_ids]:
            try:
                self._tiers.check(sequence.adapter)  # type: ignore[arg-type]
            except AdapterFailed as refusal:
                self._scheduler.finish(sequence)
                self._end_with(sequence, refusal)

    def _end_with(self, sequence: Sequence, error: LorayError) -> None:
        self._tell(sequence, error=type(error).__name__, message=error.message)
        self._forget(sequence, type(error).__name__)

    def _tell(self, sequence: Sequence, **fields: object) -> None:
        self._outgoing.append((sequence.reply, TokenEvent(sequence.request.request_id, **fields)))  # type: ignore[arg-type]

    def _forget(self, sequence: Sequence, error: str = "") -> None:
        self._on_end.pop(sequence.request.request_id)(error)
        del self._sequences[sequence.request.request_id]
        if sequence.adapter:
            self._tiers.free_unused(sequence.adapter)

    def _take_prepared(self, prepared: Prepared) -> None:
        self._num_host_loads += 1
        self._host_load_seconds += prepared.seconds
        if prepared.error:
            self._fail_adapter(self._tiers.host.failed(prepared.copy, prepared.error), prepared.error)
        else:
            self._tiers.host.arrived(prepared.copy, prepared.num_bytes)

    def _flush(self) -> None:
        if self._outgoing:
            self._tokens.send(self._outgoing)
            self._outgoing.clear()
