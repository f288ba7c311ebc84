"""Decides which sequences run next, and with how many tokens. Never touches tensors or Ray.

A step is a map sequence -> number of tokens, from one budget: decodes first, then chunks of prompts, those of the adapter served
least first (fair_queue.py), begun or not. Plans are made one step ahead: a plan may count on tokens that an earlier, unfinished
step will sample.

Blocks are taken as sequences grow; when they run out, one gives its own back and is recomputed later. Who that is, and when others
give way to those that wait, is in fair_shares.py.
"""

import time
from collections.abc import Collection, Iterable, Iterator, Mapping

from loray.deployments.adapters import Adapter, AdapterTable
from loray.deployments.block_pool import BlockPool
from loray.deployments.fair_queue import FairQueue
from loray.deployments.fair_shares import Held, Leaving, may_pass, num_blocks, num_slots, victim_of_arrival, victim_of_growth
from loray.deployments.plan import Plan
from loray.deployments.prefixes import Prefixes
from loray.deployments.sequence import Sequence
from loray.models.step import CapturedSteps, Row


class Scheduler:
    def __init__(
        self,
        blocks: BlockPool,
        adapters: AdapterTable,
        max_batch_tokens: int,
        max_running: int,
        weights: Mapping[str, float] | None = None,  # by account or adapter id, 1 where it has none
        captured: CapturedSteps | None = None,
    ) -> None:
        self.blocks = blocks
        self.adapters = adapters
        self._prefixes = Prefixes(blocks)
        self.waiting = FairQueue(weights or {})
        self.running: list[Sequence] = []  # in the order of their admission
        self.num_preemptions = 0
        self.num_started_tokens = 0  # of the sequences that were started, again after a preemption too
        self.num_cached_tokens = 0  # those of them that did not have to be computed
        self._max_batch_tokens = max_batch_tokens
        self._captured = captured
        # A step has a token for each that runs, else a flood of decodes would leave nothing for prompts.
        self._free_slots = list(range(min(max_running, max_batch_tokens) - 1, -1, -1))
        self._leaving: set[Adapter] = set()  # the pool, for one that finds no pages
        self._hurried: set[Adapter] = set()  # those of them that do so at once
        self._preempted: set[Sequence] = set()  # those that wait to go on
        self.has_displaced = False  # an adapter left the pool while requests of it wait; what is pinned may keep it from coming back

    def add(self, sequence: Sequence) -> None:
        if sequence.adapter:
            sequence.adapter = self.adapters.acquire(sequence.adapter)
        self.waiting.add(sequence)

    def finish(self, sequence: Sequence) -> None:
        """Take everything back, whatever state it is in. Steps on their way still run its rows; nobody reads the results."""
        if sequence.is_finished:
            return
        sequence.is_finished = True
        self.waiting.forget(sequence)
        self._preempted.discard(sequence)
        if sequence.slot is not None:
            self._stop_running(sequence)
        if sequence.adapter:
            self.adapters.release(sequence.adapter)

    def schedule(self) -> Plan | None:
        """The next step, or None when nothing can run."""
        self.waiting.wake_loaded()  # first: the time that it took to load is no credit, whoever is pinned meanwhile
        self._set_apart_pinned()
        self._make_room()
        self._hurry()
        plan = Plan()
        for sequence in [s for s in self.running if s.num_to_compute == 1]:
            self._grow(plan, sequence)
        self._plan_prompts(plan)
        return plan if plan.rows or plan.loads else None

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
                self._prefixes.publish(sequence)
        alive = [sequence for sequence in sampled + pooled if not sequence.is_finished]
        for sequence in alive:
            if sequence.finish_reason:
                self.finish(sequence)
        return alive

    def _set_apart_pinned(self) -> None:
        for adapter in self.adapters.take_repinned():
            self.waiting.set_apart(adapter, adapter.is_pinned, num_running=sum(other.adapter is adapter for other in self.running))

    def _plan_prompts(self, plan: Plan) -> None:
        """The rest of the budget goes to prompts, begun or waiting, least served first."""
        prefills = self._prefills()
        served = self.waiting.served
        prefills.sort(key=lambda sequence: (served(sequence), sequence.arrival), reverse=True)  # the next is the last
        heads = self._admissible()
        head = next(heads, None)
        blocked: Sequence | None = None
        kept: list[int] = []  # blocks for each that starts in the next step
        while plan.num_tokens < self._max_batch_tokens and (prefills or head):
            if not head or (prefills and served(prefills[-1]) <= served(head)):
                if self._outgrows(plan, prefills[-1]):
                    return
                self._grow(plan, prefills.pop())
            elif self._fits(head, prefills, kept) and self._may_pass(head, blocked):
                if self._comes_later(plan, head, prefills):
                    self.waiting.skip_outside()
                elif self._load_ahead(plan, head):
                    kept.append(self._prefixes.num_wanted(head))
                elif self._outgrows(plan, head):
                    return
                else:
                    self._admit(plan, head)
                head = next(heads, None)
            else:
                head, blocked = None if blocked else next(heads, None), head

    def _outgrows(self, plan: Plan, sequence: Sequence) -> bool:
        """Whether its prompt had better wait for the next step: with it, this one would take several times as long."""
        if self._captured is None or sequence.request.pooling or sequence.wants_prompt_logprobs:  # these are never replayed
            return False
        start = sequence.num_computed if sequence.slot is not None else self._prefixes.num_cached(sequence)
        return plan.outgrows(self._captured, start, min(sequence.num_tokens, start + self._max_batch_tokens - plan.num_tokens))

    def _load_ahead(self, plan: Plan, sequence: Sequence) -> bool:
        """Whether its adapter comes into the pool in this step: its sequences start in the next, so that no other waits for the copy."""
        adapter = sequence.adapter
        if adapter and not adapter.page_ids:
            plan.loads[adapter] = self.adapters.place(adapter)
            self.waiting.placed(sequence)
        return adapter in plan.loads

    def _comes_later(self, plan: Plan, sequence: Sequence, prefills: Iterable[Sequence]) -> bool:
        """Whether its adapter had better come with a later step: two copies outlast one that is replayed, and all would wait for them."""
        if not plan.loads or not self._captured or not self._comes_alone(sequence):
            return False
        return self._captured.has(plan.num_tokens + sum(other.num_to_compute for other in prefills), plan.num_scores)

    def _comes_alone(self, sequence: Sequence) -> bool:
        """Whether its adapter must come into the pool, by a copy beside the steps of others."""
        return bool(self._captured and self.running and sequence.adapter and not sequence.adapter.page_ids)

    def _grow(self, plan: Plan, sequence: Sequence) -> None:
        """Add a running sequence to the plan, at the cost of others if blocks are short."""
        if sequence.slot is None:  # gave way a moment ago
            return
        count = min(sequence.num_to_compute, self._max_batch_tokens - plan.num_tokens)
        missing = self.blocks.num_needed(sequence.num_computed + count) - len(sequence.block_ids)
        while missing > self.blocks.num_free:
            victim = victim_of_growth(self.running, self.waiting) or sequence
            self._preempt(plan, victim)
            if victim is sequence:
                return
        self._plan_row(plan, sequence, count, self.blocks.allocate(max(missing, 0)))

    def _make_room(self) -> None:
        """Before a step: slots and blocks for the first in the queue, from those that hold far more than they will."""
        prefills = self._prefills()
        num_new = num_new_blocks = num_tokens = 0  # of those that will fit
        blocked: Sequence | None = None
        has_alone = False
        for head in self._admissible():
            comes_alone = self._comes_alone(head)
            if comes_alone and has_alone:
                self.waiting.skip_outside()
                continue
            has_alone = has_alone or comes_alone
            if num_tokens >= self._max_batch_tokens or not self._may_pass(head, blocked):
                return
            num_wanted = self._prefixes.num_wanted(head)
            is_fit = True
            while is_fit and len(self._free_slots) <= num_new:
                is_fit = self._take_over(head, 1, num_slots)
            while is_fit and self.blocks.num_free - self._num_reserved(prefills) < num_new_blocks + num_wanted:
                is_fit = self._take_over(head, num_wanted, num_blocks)
            if is_fit:
                num_new, num_new_blocks, num_tokens = num_new + 1, num_new_blocks + num_wanted, num_tokens + head.num_tokens
            elif blocked:
                return
            else:
                blocked = head

    def _take_over(self, taker: Sequence, num_wanted: int, held: Held) -> bool:
        if victim := victim_of_arrival(taker, num_wanted, held, self._max_batch_tokens, self.running, self.waiting):
            self._preempt(Plan(), victim)
        return victim is not None

    def _may_pass(self, head: Sequence, blocked: Sequence | None) -> bool:
        return blocked is None or may_pass(head, self._prefixes.num_wanted(head), blocked, self.running, self.waiting)

    def _admissible(self) -> Iterator[Sequence]:
        """Waiting sequences that could start, least served first. When an adapter outside the pool finds no pages, those that come free
        are kept for it; those behind it are looked at as long as others make room for them."""
        leaving: Leaving | None = None  # once one finds no pages
        were_leaving, self._leaving, self._hurried = self._leaving, set(), set()
        for sequence in self.waiting:
            adapter = sequence.adapter
            if sequence.num_unknown:  # it was preempted and its last token is still on its way
                continue
            if adapter is None or adapter.page_ids:
                if adapter not in self._leaving:
                    yield sequence
                elif bound := [one for one in self._bound_to(adapter) if not one.num_unknown]:  # it may stand behind an older one
                    yield min(bound, key=lambda one: one.arrival)
            elif not leaving and (self.adapters.can_place(adapter) or self._displace_idle(adapter)):
                yield sequence
            elif self.adapters.could_place(adapter):
                if leaving is None:
                    leaving = Leaving(self._max_batch_tokens, self.adapters, were_leaving, self.running, self.waiting)
                    self._leaving, self._hurried = leaving.adapters, leaving.hurried
                    num_reserved = self._num_reserved(self._prefills())
                if not leaving.make_room(sequence, self._prefixes.num_wanted(sequence) + num_reserved - self.blocks.num_free):
                    self.waiting.skip_outside()
                for unused in leaving.adapters.difference(other.adapter for other in self.running):  # some were started meanwhile
                    if unused.page_ids and not self._bound_to(unused):
                        self._displace(unused)

    def _displace_idle(self, adapter: Adapter) -> bool:
        """Whether there are pages for it once those leave of which nothing can start yet."""
        idle = [other for other in self.waiting.idle_held() if not other.is_pinned and self.adapters.could_place(other)]
        if adapter.num_pages > self.adapters.num_available_pages + sum(other.num_pages for other in idle):
            return False
        while not self.adapters.can_place(adapter):
            self._displace(idle.pop())
        return True

    def _displace(self, adapter: Adapter) -> None:
        self.adapters.discard(adapter, is_begun=any(sequence.adapter is adapter for sequence in self._preempted))
        self.has_displaced = True

    def _hurry(self) -> None:
        """Sequences for whom others would wait too long give way."""
        for sequence in reversed(self.running[:]):  # so that the oldest goes on first
            if sequence.adapter in self._hurried:
                self._preempt(Plan(), sequence)

    def _prefills(self) -> list[Sequence]:
        return [sequence for sequence in self.running if sequence.num_to_compute > 1]

    def _num_reserved(self, prefills: Iterable[Sequence]) -> int:
        """Blocks that are spoken for: the rest of each prompt in progress, and one more for each that runs."""
        rest = (self.blocks.num_needed(s.num_tokens) - len(s.block_ids) for s in prefills if s.slot is not None)
        return len(self.running) + sum(rest)

    def _fits(self, sequence: Sequence, prefills: Iterable[Sequence], kept: list[int]) -> bool:
        """kept: blocks for each of those that have a place already."""
        num_taken = sum(kept) + self._num_reserved(prefills)
        return len(self._free_slots) > len(kept) and self._prefixes.num_wanted(sequence) + num_taken <= self.blocks.num_free

    def _admit(self, plan: Plan, sequence: Sequence) -> None:
        cached = self._prefixes.take(sequence)
        sequence.block_ids = cached
        sequence.num_published = len(cached)
        sequence.num_computed = len(cached) * self.blocks.block_size
        self.num_started_tokens += len(sequence.token_ids)
        self.num_cached_tokens += sequence.num_computed
        self.waiting.take(sequence)
        self._preempted.discard(sequence)
        sequence.queue_s = sequence.queue_s or time.monotonic() - sequence.accepted_at
        sequence.slot = self._free_slots.pop()
        self.running.append(sequence)
        sequence.num_owed = sequence.num_tokens - sequence.num_computed
        plan.admit(sequence)
        count = min(sequence.num_to_compute, self._max_batch_tokens - plan.num_tokens)
        new = self.blocks.num_needed(sequence.num_computed + count) - len(cached)
        self._plan_row(plan, sequence, count, self.blocks.allocate(new))

    def _plan_row(self, plan: Plan, sequence: Sequence, count: int, new_block_ids: list[int]) -> None:
        assert sequence.slot is not None
        sequence.block_ids += new_block_ids
        sequence.num_computed += count
        samples = sequence.num_computed == sequence.num_tokens
        plan.add(sequence, Row(slot=sequence.slot, num_tokens=count, new_block_ids=new_block_ids, samples=samples))
        sequence.num_unknown += samples
        sequence.num_owed -= samples
        self.waiting.charge(sequence, count)

    def _preempt(self, plan: Plan, sequence: Sequence) -> None:
        row = plan.remove(sequence)
        if row:
            sequence.num_unknown -= row.samples
            self.waiting.refund(sequence, row.num_tokens)
        self.waiting.put_back(sequence)
        self._preempted.add(sequence)
        self._stop_running(sequence)
        self.num_preemptions += 1

    def _stop_running(self, sequence: Sequence) -> None:
        assert sequence.slot is not None
        self.running.remove(sequence)
        self.blocks.release(sequence.block_ids)
        self._free_slots.append(sequence.slot)
        sequence.slot, sequence.block_ids = None, []
        sequence.num_computed = sequence.num_published = 0
        adapter = sequence.adapter
        if adapter is None or adapter not in self._leaving or adapter.is_pinned:
            return
        if all(other.adapter is not adapter for other in (*self.running, *self._bound_to(adapter))):
            self._displace(adapter)

    def _bound_to(self, adapter: Adapter | None) -> Collection[Sequence]:
        """Those that can go on with its pages alone: it could not come back, since pins leave too little room, or since it is not in host
        memory, and its files may be others by now."""
        can_return = adapter is None or (adapter.is_ready and self.adapters.could_place(adapter))
        return () if can_return else [sequence for sequence in self._preempted if sequence.adapter is adapter]
