"""Who gives way when slots, blocks or rank pages are short. Only says who; the scheduler acts. Never touches tensors or Ray.

Turns alone (fair_queue.py) are not fair while a flood of long sequences holds all there is to hold, so what is held passes on:
- Slots and blocks, to a waiting sequence: from the adapter that holds most for its weight, if that is at least twice what the taker
  will have. Who has the smaller half can't be asked for it in turn, so nothing goes back and forth.
- Blocks, to a running sequence that grows: from the adapter that holds most for its weight.
- A waiting sequence that finds no blocks holds up those behind it, else small ones would pass it forever; but not those that will
  hold at most half of what its adapter does.
- Rank pages, to the adapters that find none: from those ahead of them by more than a full step's tokens, the most served first, each
  for one of those that wait. Nothing more of theirs is admitted, and they leave the pool when their last sequence stops running, or at
  once when none runs; nothing is computed twice. They leave at the same time: one after another, the last in a long line would wait for
  all of them. Versions of one adapter have one account, so none is ahead of another: when its turn comes, one that waits has those in the
  pool leave that run, or wait for less long.
  Answers may be long, so for one that could start right away two kinds stop at once and are recomputed later: who has most of the
  pool, and those for whose pages one waits that has at least as many already, which stand empty meanwhile. But only when each of
  their sequences has sampled as many tokens as its start has cost: no more is recomputed than is gained.
Of slots and blocks an adapter's youngest sequence goes first, since it loses least, and the oldest of all never gives way: it gets to
its end, and then another is the oldest, so every sequence ends.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping

from loray.deployments.adapters import Adapter, AdapterTable
from loray.deployments.fair_queue import FairQueue, account_name
from loray.deployments.sequence import Sequence

Held = Callable[[Sequence], int]  # what a running sequence holds of what is short


def num_slots(sequence: Sequence) -> int:
    return 1


def num_blocks(sequence: Sequence) -> int:
    return len(sequence.block_ids)


def victim_of_growth(running: Collection[Sequence], queue: FairQueue) -> Sequence | None:
    """The running sequence that gives up its blocks when a running one finds none."""
    return _youngest_of_largest(running, running, _shares(running, num_blocks, queue))


def victim_of_arrival(
    taker: Sequence, num_wanted: int, held: Held, lead: float, running: Collection[Sequence], queue: FairQueue
) -> Sequence | None:
    """The running sequence whose place a waiting one may take: of an adapter that it is at most `lead` ahead of."""
    account = account_name(taker.adapter)
    shares = _shares(running, held, queue)
    share = shares[account] + num_wanted / queue.weight_of(taker)
    candidates = (s for s in running if account_name(s.adapter) != account and queue.served(s) + lead >= queue.served(taker))
    victim = _youngest_of_largest(candidates, running, shares)
    return victim if victim and shares[account_name(victim.adapter)] >= 2 * share else None


def may_pass(sequence: Sequence, num_wanted: int, blocked: Sequence, running: Iterable[Sequence], queue: FairQueue) -> bool:
    """Whether a waiting sequence need not wait behind one that finds no blocks: it will hold at most half of what that one's do."""
    shares = _shares(running, num_blocks, queue)
    share = shares[account_name(sequence.adapter)] + num_wanted / queue.weight_of(sequence)
    return shares[account_name(blocked.adapter)] >= 2 * share


class Leaving:
    """The adapters that make room in the pool for others."""

    def __init__(
        self, lead: float, table: AdapterTable, were_leaving: Collection[Adapter], running: Collection[Sequence], queue: FairQueue
    ) -> None:
        self.adapters: set[Adapter] = set()
        self.hurried: set[Adapter] = set()  # those of them that do so at once
        self._lead = lead
        self._table = table
        self._num_kept = table.num_available_pages  # too few for the first of those that wait, and kept for it alone
        self._queue = queue
        self._running = running
        self._active = {s.adapter for s in running}
        self._heads = queue.heads_inside()
        users = {adapter: sequence for sequence in (*self._heads.values(), *running) if (adapter := sequence.adapter)}
        self._served = {adapter: queue.served(user) for adapter, user in users.items() if not adapter.is_pinned}
        self._weights = {adapter: queue.weight_of(user) for adapter, user in users.items()}
        # The next is the last: who is on the way out already, then who was served most.
        self._others = sorted(self._served, key=lambda adapter: (adapter in were_leaving, self._served[adapter]))

    def make_room(self, starved: Sequence, num_missing_blocks: int) -> bool:
        """For one more waiting sequence's adapter: of those more than `lead` tokens ahead, as many as it takes. Whether there was one.

        num_missing_blocks: more than are free must come free before it can start."""
        assert starved.adapter, "the base model needs no pages"
        num_kept, self._num_kept = self._num_kept, 0
        num_missing = starved.adapter.num_pages - num_kept
        account, served, weight = account_name(starved.adapter), self._queue.served(starved), self._queue.weight_of(starved)
        leaving: list[Adapter] = []
        num_leaving = 0
        for adapter in reversed(self._others):
            if num_missing <= num_leaving:
                break
            lead, is_active = (self._served[adapter] - served) * max(1.0, weight, self._weights[adapter]), adapter in self._active
            is_sibling = account_name(adapter) == account and (is_active or self._heads[adapter].arrival > starved.arrival)
            if lead > self._lead or is_sibling:
                leaving.append(adapter)
                num_leaving += adapter.num_pages
        for adapter in leaving:
            self._others.remove(adapter)
        is_long = num_missing <= num_kept or any(2 * adapter.num_pages > self._table.num_pages for adapter in leaving)
        if num_missing <= num_leaving and is_long and self._may_stop(leaving, num_missing_blocks):
            self.hurried.update(leaving)
        self.adapters.update(leaving)
        return bool(leaving)

    def _may_stop(self, adapters: Collection[Adapter], num_missing_blocks: int) -> bool:
        """Whether it would help, nothing would be lost by it, and they can come back: with the same files, in spite of all pins, and
        before no other version that is asked for now."""
        can_return = all(
            adapter.is_ready and self._table.could_place(adapter) and not self._queue.has_other_version(adapter) for adapter in adapters
        )
        sequences = [sequence for sequence in self._running if sequence.adapter in adapters]
        has_blocks = num_missing_blocks <= sum(len(sequence.block_ids) for sequence in sequences)
        return can_return and has_blocks and all(sequence.num_owed <= 0 for sequence in sequences)


def _shares(running: Iterable[Sequence], held: Held, queue: FairQueue) -> dict[str, float]:
    """What each adapter's running sequences hold, for its weight."""
    shares: dict[str, float] = defaultdict(float)
    for sequence in running:
        shares[account_name(sequence.adapter)] += held(sequence) / queue.weight_of(sequence)
    return shares


def _youngest_of_largest(candidates: Iterable[Sequence], running: Iterable[Sequence], shares: Mapping[str, float]) -> Sequence | None:
    oldest = min(running, key=lambda sequence: sequence.arrival, default=None)
    others = (sequence for sequence in candidates if sequence is not oldest)
    return max(others, key=lambda sequence: (shares[account_name(sequence.adapter)], sequence.arrival), default=None)
