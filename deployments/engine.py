"""Runs the scheduler against the ranks, one step ahead, in one thread. Knows neither Ray nor text.

Everything else reaches the engine through its inbox; tokens leave through the token channel. Only this thread touches the
scheduler, so there are no locks.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Collection
from queue import Empty, SimpleQueue
from typing import Protocol

from loray.cluster.channel import Address
from loray.deployments.adapters import Adapter
from loray.deployments.errors import AdapterFailed, InvalidRequest, LorayError, Overloaded
from loray.deployments.request import GenerationRequest, TokenEvent
from loray.deployments.scheduler import Plan, Scheduler
from loray.deployments.sequence import Sequence
from loray.deployments.token_channel import TokenSender
from loray.models.step import Step, StepResult

STEPS_IN_FLIGHT = 2  # one that runs, one that waits for it
IDLE_WAIT_MS = 1000


class Steps(Protocol):
    """The engine's way to the ranks."""

    def send(self, step: Step) -> None: ...
    def receive(self, timeout_ms: int) -> StepResult | None: ...


class Engine:
    def __init__(self, scheduler: Scheduler, steps: Steps, wake: Callable[[], None], eos_ids: Collection[int], max_waiting: int) -> None:
        self._scheduler = scheduler
        self._steps = steps
        self._wake = wake
        self._eos_ids = frozenset(eos_ids)
        self._max_waiting = max_waiting
        self._tokens = TokenSender()
        self._inbox: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._sequences: dict[str, Sequence] = {}
        self._on_end: dict[str, Callable[[], None]] = {}
        self._in_flight: deque[Plan] = deque()
        self._outgoing: list[tuple[Address, TokenEvent]] = []
        self._num_arrived = 0
        self._num_steps = 0
        self._num_tokens = 0
        self._num_embeddings = 0
        self._last_progress = time.monotonic()

    # Called from any thread.

    def submit(self, request: GenerationRequest, adapter: Adapter | None, reply: Address, on_end: Callable[[], None]) -> None:
        """Every submitted request ends in a last TokenEvent to `reply`, unless aborted; then `on_end` is called."""
        self._post(lambda: self._accept(request, adapter, reply, on_end))

    def refuse(self, request_id: str, error: LorayError, reply: Address) -> None:
        """Answer a request that ended before it reached the scheduler."""
        self._post(lambda: self._outgoing.append((reply, TokenEvent(request_id, error=type(error).__name__, message=error.message))))

    def abort(self, request_id: str) -> None:
        self._post(lambda: self._abort(request_id))

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
            "preemptions_total": scheduler.num_preemptions,
            "prefix_cached_tokens_total": scheduler.num_cached_tokens,
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
        self._wake()

    def _turn(self) -> None:
        self._read_inbox()
        for address in self._tokens.lost():
            self._abort_all(address)
        while len(self._in_flight) < STEPS_IN_FLIGHT and (plan := self._scheduler.schedule()):
            self._send(plan)
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

    def _send(self, plan: Plan) -> None:
        if not self._in_flight:
            self._last_progress = time.monotonic()
        self._num_steps += 1
        self._in_flight.append(plan)
        self._steps.send(Step(self._num_steps, list(plan.loads.values()), plan.admissions, list(plan.rows.values())))

    def _complete(self, result: StepResult) -> None:
        plan = self._in_flight.popleft()
        self._last_progress = time.monotonic()
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

    def _accept(self, request: GenerationRequest, adapter: Adapter | None, reply: Address, on_end: Callable[[], None]) -> None:
        sequence = Sequence(request, adapter, reply, self._num_arrived)
        self._num_arrived += 1
        if not self._tokens.knows(reply):  # a new ingress, perhaps in place of one that is gone
            self._tokens.keep({other.reply for other in self._sequences.values()})
        self._sequences[request.request_id] = sequence
        self._on_end[request.request_id] = on_end
        refusal = self._refusal(sequence)
        if refusal:
            sequence.is_finished = True
            self._end_with(sequence, refusal)
        else:
            self._scheduler.add(sequence)
            self._tell(sequence)

    def _refusal(self, sequence: Sequence) -> LorayError | None:
        """Why this sequence could never run here."""
        scheduler = self._scheduler
        num_tokens = sequence.request.max_tokens
        if len(scheduler.waiting) >= self._max_waiting:
            return Overloaded(f"{len(scheduler.waiting)} requests are waiting already; try again")
        if scheduler.blocks.num_needed(num_tokens) > scheduler.blocks.num_blocks:
            room = scheduler.blocks.num_blocks * scheduler.blocks.block_size
            what = "the input is" if sequence.request.pooling else "prompt and max_new_tokens are"
            return InvalidRequest(f"{what} {num_tokens} tokens, more than the KV cache holds ({room})")
        if sequence.adapter and sequence.adapter.num_pages > scheduler.adapters.num_pages:
            return AdapterFailed(
                f"adapter {sequence.adapter.adapter_id!r} needs {sequence.adapter.num_pages} rank pages, "
                f"the pool has {scheduler.adapters.num_pages}: raise adapters.gpu_bytes"
            )
        return None

    def _abort(self, request_id: str) -> None:
        sequence = self._sequences.get(request_id)
        if sequence:
            self._scheduler.finish(sequence)
            self._forget(sequence)

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

    def _end_with(self, sequence: Sequence, error: LorayError) -> None:
        self._tell(sequence, error=type(error).__name__, message=error.message)
        self._forget(sequence)

    def _tell(self, sequence: Sequence, **fields: object) -> None:
        self._outgoing.append((sequence.reply, TokenEvent(sequence.request.request_id, **fields)))  # type: ignore[arg-type]

    def _forget(self, sequence: Sequence) -> None:
        self._on_end.pop(sequence.request.request_id)()
        del self._sequences[sequence.request.request_id]

    def _flush(self) -> None:
        if self._outgoing:
            self._tokens.send(self._outgoing)
            self._outgoing.clear()
