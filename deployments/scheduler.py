"""Decides which sequences run next, and with how many tokens. Never touches tensors or Ray.

A step is a map sequence -> number of tokens, from one budget: decodes first, then chunks of prompts, oldest first. Blocks are
taken as sequences grow; when they run out the youngest gives its own back and is recomputed later. Plans are made one step
ahead: a plan may count on tokens that an earlier, unfinished step will sample.
"""

from collections import deque
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

from loray.deployments.adapters import Adapter, AdapterTable
from loray.deployments.block_pool import BlockPool
from loray.deployments.sequence import Sequence
from loray.models.step import AdapterLoad, Admission, Row


@dataclass(eq=False, slots=True)
class Plan:
    """One step, and whose tokens and embeddings it makes."""

    loads: dict[Adapter, AdapterLoad] = field(default_factory=dict)
    admissions: list[Admission] = field(default_factory=list)
    rows: dict[Sequence, Row] = field(default_factory=dict)
    num_tokens: int = 0

    @property
    def sampled(self) -> list[Sequence]:
        """The sequences that get a token, in the order of the step's rows."""
        return [sequence for sequence, row in self.rows.items() if row.samples and not sequence.request.pooling]

    @property
    def pooled(self) -> list[Sequence]:
        """The sequences that get their embedding, in the order of the step's rows."""
        return [sequence for sequence, row in self.rows.items() if row.samples and sequence.request.pooling]


class Scheduler:
    def __init__(self, blocks: BlockPool, adapters: AdapterTable, max_batch_tokens: int, max_running: int) -> None:
        self.blocks = blocks
        self.adapters = adapters
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []  # oldest first
        self.num_preemptions = 0
        self.num_cached_tokens = 0  # prompt tokens that did not have to be computed
        self._max_batch_tokens = max_batch_tokens
        self._free_slots = list(range(max_running - 1, -1, -1))

    def add(self, sequence: Sequence) -> None:
        if sequence.adapter:
            sequence.adapter = self.adapters.acquire(sequence.adapter)
        self.waiting.append(sequence)

    def finish(self, sequence: Sequence) -> None:
        """Take everything back, whatever state it is in. Steps on their way still run its rows; nobody reads the results."""
        if sequence.is_finished:
            return
        sequence.is_finished = True
        if sequence.slot is None:
            self.waiting.remove(sequence)
        else:
            self._stop_running(sequence)
        if sequence.adapter:
            self.adapters.release(sequence.adapter)

    def schedule(self) -> Plan | None:
        """The next step, or None when nothing can run."""
        plan = Plan()
        preemptions = self.num_preemptions
        decodes = [s for s in self.running if s.num_to_compute == 1]
        prefills = [s for s in self.running if s.num_to_compute > 1]
        for sequence in decodes + prefills:
            if sequence.slot is not None and plan.num_tokens < self._max_batch_tokens:
                self._grow(plan, sequence)
        if self.num_preemptions == preemptions:
            for sequence in self._admissible():
                if not self._free_slots or plan.num_tokens >= self._max_batch_tokens or not self._admit(plan, sequence):
                    break
        return plan if plan.rows else None

    def complete(self, plan: Plan, token_ids: list[int], eos_ids: Collection[int]) -> list[Sequence]:
        """Give a finished step's tokens to their sequences; those still wanted come back, with them those that have their embedding."""
        sampled, pooled = plan.sampled, plan.pooled
        assert len(sampled) == len(token_ids), "a step answers with one token for each row that samples"
        for sequence, token_id in zip(sampled, token_ids, strict=True):
            sequence.num_unknown -= 1
            if not sequence.is_finished:
                sequence.append(token_id, eos_ids)
        for sequence in pooled:
            sequence.num_unknown -= 1
            if not sequence.is_finished:
                sequence.finish_reason = "embedding"
        for sequence in plan.rows:
            if sequence.slot is not None:
                self._publish(sequence)
        alive = [sequence for sequence in sampled + pooled if not sequence.is_finished]
        for sequence in alive:
            if sequence.finish_reason:
                self.finish(sequence)
        return alive

    def _grow(self, plan: Plan, sequence: Sequence) -> None:
        """Add a running sequence to the plan, at the cost of younger ones if blocks are short."""
        count = min(sequence.num_to_compute, self._max_batch_tokens - plan.num_tokens)
        missing = self.blocks.num_needed(sequence.num_computed + count) - len(sequence.block_ids)
        while missing > self.blocks.num_free:
            youngest = max(self.running, key=lambda running: running.arrival)
            self._preempt(plan, youngest)
            if youngest is sequence:
                return
        self._plan_row(plan, sequence, count, self.blocks.allocate(max(missing, 0)))

    def _admissible(self) -> Iterator[Sequence]:
        """Waiting sequences, oldest first, past those whose adapter finds no pages: they block nobody."""
        starved: set[str] = set()
        for sequence in list(self.waiting):
            adapter = sequence.adapter
            if adapter and not adapter.page_ids and (adapter.version in starved or not self.adapters.can_place(adapter)):
                starved.add(adapter.version)
            elif sequence.num_unknown == 0:  # else it was preempted and its last token is still on its way
                yield sequence

    def _admit(self, plan: Plan, sequence: Sequence) -> bool:
        """Start a waiting sequence, if its whole prompt finds blocks and each running one could still take another."""
        # At least one token is computed, so that there is something to sample from. An embedding takes all its tokens.
        num_reusable = 0 if sequence.request.pooling else (len(sequence.token_ids) - 1) // self.blocks.block_size
        cached = self.blocks.take_cached(sequence.hash_full_blocks(self.blocks.block_size)[:num_reusable])
        if self.blocks.num_needed(sequence.num_tokens) - len(cached) + len(self.running) > self.blocks.num_free:
            self.blocks.release(cached)
            return False
        sequence.block_ids = cached
        sequence.num_published = len(cached)
        sequence.num_computed = len(cached) * self.blocks.block_size
        self.num_cached_tokens += sequence.num_computed
        if sequence.adapter and not sequence.adapter.page_ids:
            plan.loads[sequence.adapter] = self.adapters.place(sequence.adapter)
        self.waiting.remove(sequence)
        sequence.slot = self._free_slots.pop()
        self.running.append(sequence)
        plan.admissions.append(
            Admission(
                slot=sequence.slot,
                token_ids=list(sequence.token_ids),
                block_ids=cached[:],
                num_computed=sequence.num_computed,
                page_ids=sequence.adapter.page_ids if sequence.adapter else [],
                sampling=sequence.request.sampling,
                pooling=sequence.request.pooling,
            )
        )
        count = min(sequence.num_to_compute, self._max_batch_tokens - plan.num_tokens)
        new = self.blocks.num_needed(sequence.num_computed + count) - len(cached)
        self._plan_row(plan, sequence, count, self.blocks.allocate(new))
        return True

    def _plan_row(self, plan: Plan, sequence: Sequence, count: int, new_block_ids: list[int]) -> None:
        assert sequence.slot is not None
        sequence.block_ids += new_block_ids
        sequence.num_computed += count
        samples = sequence.num_computed == sequence.num_tokens
        plan.rows[sequence] = Row(slot=sequence.slot, num_tokens=count, new_block_ids=new_block_ids, samples=samples)
        sequence.num_unknown += samples
        plan.num_tokens += count

    def _preempt(self, plan: Plan, sequence: Sequence) -> None:
        row = plan.rows.pop(sequence, None)
        if row:
            sequence.num_unknown -= row.samples
            plan.num_tokens -= row.num_tokens
        self._stop_running(sequence)
        self.waiting.appendleft(sequence)
        self.num_preemptions += 1

    def _stop_running(self, sequence: Sequence) -> None:
        assert sequence.slot is not None
        self.running.remove(sequence)
        self.blocks.release(sequence.block_ids)
        self._free_slots.append(sequence.slot)
        sequence.slot = None
        sequence.block_ids = []
        sequence.num_computed = sequence.num_published = 0

    def _publish(self, sequence: Sequence) -> None:
        """Make its full blocks findable. Their content may still be on its way, but always ahead of any step that reads it."""
        hashes = sequence.hash_full_blocks(self.blocks.block_size)
        num_full = min(sequence.num_computed // self.blocks.block_size, len(hashes))
        for i in range(sequence.num_published, num_full):
            self.blocks.publish(sequence.block_ids[i], hashes[i])
        sequence.num_published = max(sequence.num_published, num_full)
