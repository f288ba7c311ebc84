"""Whose turn it is: the waiting sequences of each adapter, and the tokens each was served. Knows neither slots, blocks nor steps.

Virtual token counters (Sheng et al. 2024, "Fairness in Serving Large Language Models"): every computed token is charged to its adapter,
divided by the adapter's weight, and the adapter served least goes first. The base model is an adapter like any other, with the id "". One
that comes starts with the least served that runs, so idle time earns no credit, nor does the time it takes to load; not with the least
that waits, or ever new ones would keep it waiting, but at most `max_credit` behind that. One that comes back starts where it was, so that
who asks for one answer after another pays for those before, but at most `max_credit` behind a new one: what an adapter without requests was
served is forgotten when all others are as far ahead. One that always runs but asks for little earns little credit, too: while none of its
requests wait, it falls no more than `max_credit` behind the least served that waits, or that started last; else those who take what
nobody wants would pay for it later.

All versions of an adapter have one account, but for those that are pinned: they are always in the pool, and what they are served would
keep a version that is not from ever getting there.
"""

import math
from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping
from itertools import islice

from loray.deployments.adapters import Adapter
from loray.deployments.fair_lines import Account, Lane, Line
from loray.deployments.sequence import Sequence

MAX_DEBTS = 10_000
MOST_AHEAD = 2048  # tokens of the prompts of adapters that have just come; with the step that computes them they go ahead no longer
NUM_DEBTS_LOOKED_AT = 8  # whenever an adapter's last request ends


def adapter_name(adapter: Adapter | None) -> str:
    """The same for all its versions."""
    return adapter.account or adapter.adapter_id if adapter else ""


def account_name(adapter: Adapter | None) -> str:
    return f"{adapter_name(adapter)}\0{adapter.version}" if adapter and adapter.is_apart else adapter_name(adapter)


class FairQueue:
    """Lines stand in one of two lanes, or aside while their adapter is not ready: what can't start is not looked at in each step."""

    def __init__(self, weights: Mapping[str, float], max_credit: float = math.inf) -> None:
        assert all(weight > 0 for weight in weights.values()), "an adapter's weight is above 0"
        self._weights = weights  # by account, or by adapter id
        self._max_credit = max_credit  # tokens, divided by the weight
        self._latest: Account | None = None  # that a sequence of was started
        self._accounts: dict[str, Account] = {}  # of the adapters that have requests, by name
        self._running: dict[str, Account] = {}  # those of them that run
        self._debts: OrderedDict[str, float] = OrderedDict()  # tokens served, of adapters without requests, by name
        self._inside, self._outside = Lane(), Lane()  # of the base model and the adapters in the pool; of the others
        self._is_outside_shown = True
        self._loading: dict[Line, None] = {}  # in the order in which they were found to be
        self._held: dict[Sequence, None] = {}  # whose grammars the ranks don't have yet: in no line, where they would hold others up
        self._may_go_ahead = True
        self._num_ahead = 0  # tokens of prompts that went ahead of others, less those that had their turn
        self._num_waiting = 0  # in lines, or held
        self._num_waiting_of: Counter[str] = Counter()  # by adapter

    def __len__(self) -> int:
        """Sequences that wait."""
        return self._num_waiting

    def num_waiting_of(self, name: str) -> int:
        return self._num_waiting_of[name]

    def weight_of(self, sequence: Sequence) -> float:
        """Of its adapter."""
        return self._account_of(sequence).weight

    def served(self, sequence: Sequence) -> float:
        """Tokens that its adapter was served, for its weight."""
        return self._account_of(sequence).served

    def turn_of_prompt(self, sequence: Sequence) -> tuple[bool, float]:
        """The least comes first, begun or not: those of adapters that have just come, then the others, each by what was served.

        One that has just come would have its turn anyway; those who are always here had better wait for its prompt than halve its pace.
        Once ever new ones have had so much more than others, all go by what they were served, for as many tokens."""
        is_ahead = self._may_go_ahead and sequence.is_first and sequence.num_computed < MOST_AHEAD
        return not is_ahead, self.served(sequence)

    def charge(self, sequence: Sequence, num_tokens: int) -> None:
        account = self._account_of(sequence)
        account.served += num_tokens / account.weight
        is_ahead = self._may_go_ahead and sequence.is_first and self._num_waiting
        self._num_ahead = max(self._num_ahead + (num_tokens if is_ahead else -num_tokens), 0)
        self._may_go_ahead = self._num_ahead < MOST_AHEAD if self._may_go_ahead else self._num_ahead == 0
        sequence.is_first = sequence.is_first and sequence.num_computed < sequence.num_prompt  # the rest is its answer

    def refund(self, sequence: Sequence, num_tokens: int) -> None:
        """What was charged for a row that is not computed after all."""
        self.charge(sequence, -num_tokens)
        for line in self._account_of(sequence).lines.values():
            if line.entry:  # a lane finds the entries that are too low by itself, not those that are too high
                self._lane_of(line).push(line)

    def add(self, sequence: Sequence) -> None:
        if sequence.waits_for_grammar:
            self._held[sequence] = None
            self._count_waiting(sequence, 1)
            return
        name = account_name(sequence.adapter)
        if name not in self._accounts:
            floor = self._floor()
            served = max(self._debts.get(name, floor), floor - self._max_credit)
            self._open(sequence.adapter, served)
            sequence.is_first = served <= floor
        self._insert(sequence)

    def set_apart(self, adapter: Adapter, is_apart: bool, num_running: int) -> None:
        """Whether a version has an account of its own from now on. Its sequences, of which so many run, go there; one that is new begins
        with what they were served where they were."""
        old = self._accounts.get(account_name(adapter))
        waiting = list(old.lines[adapter].sequences) if old and adapter in old.lines else []
        for sequence in waiting:
            self._remove(sequence)
        adapter.is_apart = is_apart
        if old and (waiting or num_running):
            new = self._accounts.get(account_name(adapter)) or self._open(adapter, old.served)
            self._count_running(old, -num_running)
            self._count_running(new, num_running)
            for sequence in waiting:
                self._insert(sequence)
            self._leave_if_unused(old)

    def take(self, sequence: Sequence) -> None:
        """It waits no longer, it runs."""
        account = self._account_of(sequence)
        self._count_running(account, 1)
        self._latest = account
        self._remove(sequence)
        line = account.lines.get(sequence.adapter)
        if line:
            self._lane_of(line).push(line)  # it may be in the pool from now on

    def put_back(self, sequence: Sequence) -> None:
        """It runs no longer, and waits ahead of those of its version that came later."""
        sequence.is_first = False
        self._insert(sequence)
        self._stop(sequence)

    def forget(self, sequence: Sequence) -> None:
        """It is finished, whether it ran or waited."""
        if sequence in self._held:
            self._let_go(sequence)
            return
        if sequence.slot is None:
            self._remove(sequence)
        else:
            self._stop(sequence)
        self._leave_if_unused(self._account_of(sequence))

    def _let_go(self, sequence: Sequence) -> None:
        del self._held[sequence]
        self._count_waiting(sequence, -1)

    def _account_of(self, sequence: Sequence) -> Account:
        return self._accounts[account_name(sequence.adapter)]

    def _open(self, adapter: Adapter | None, served: float) -> Account:
        """It has none yet."""
        weight_by_id = self._weights.get(adapter.adapter_id, 1.0) if adapter else 1.0
        weight = self._weights.get(adapter_name(adapter), weight_by_id)
        name = account_name(adapter)
        self._debts.pop(name, None)
        self._accounts[name] = Account(name, weight, served)
        return self._accounts[name]

    def _leave_if_unused(self, account: Account) -> None:
        if account.num_running or account.num_waiting:
            return
        del self._accounts[account.name]
        if not self._accounts:
            self._debts.clear()
            return
        floor = self._floor()
        for name in list(islice(self._debts, NUM_DEBTS_LOOKED_AT)):  # those that left first: a few each time, so that none costs much
            if self._debts[name] <= floor - self._max_credit or len(self._debts) >= MAX_DEBTS:
                del self._debts[name]
            else:
                self._debts.move_to_end(name)
        self._debts[account.name] = account.served

    def wake_loaded(self) -> None:
        """Adapters that have become ready since the last call get in line, and so do sequences whose grammars have."""
        for sequence in [sequence for sequence in self._held if not sequence.waits_for_grammar]:
            self._let_go(sequence)
            self.add(sequence)
        for line in [line for line in self._loading if line.adapter and (line.adapter.is_ready or line.adapter.page_ids)]:
            del self._loading[line]
            line.account.served = max(line.account.served, self._floor())
            self._lane_of(line).push(line)

    def __iter__(self) -> Iterator[Sequence]:
        """The next of each version whose adapter is ready, least served first. After one that is taken comes the one behind it.

        The cost is that of what is looked at. Only the latest iterator may be used."""
        self._inside.restore()
        self._outside.restore()
        self._is_outside_shown = True
        shown: set[Sequence] = set()
        while fronts := [(entry, lane) for lane in self._lanes() if (entry := lane.front())]:
            (*_, line), lane = min(fronts, key=lambda front: front[0][0])
            if self._lane_of(line) is not lane:
                self._lane_of(line).push(line)
            elif lane is self._outside and line.adapter and not line.adapter.is_ready:
                line.entry = None
                self._loading[line] = None
            elif line.head in shown:
                lane.pass_front()
            else:
                shown.add(line.head)
                yield line.head

    def skip_outside(self) -> None:
        """Show no more of those whose adapter is outside the pool, in this iteration."""
        self._is_outside_shown = False

    def has_other_version(self, adapter: Adapter) -> bool:
        """Whether sequences of another version wait."""
        return any(version is not adapter for version in self._accounts[account_name(adapter)].lines)

    def heads_inside(self) -> dict[Adapter, Sequence]:
        """The next of each adapter in the pool that has any."""
        return {line.adapter: line.head for line in self._inside.lines() if line.adapter and line.adapter.page_ids}

    def idle_held(self) -> list[Adapter]:
        """Adapters in the pool all of whose sequences wait for their grammars."""
        held = Counter(sequence.adapter for sequence in self._held)
        return [adapter for adapter, count in held.items() if adapter and adapter.page_ids and count == adapter.references]

    def placed(self, sequence: Sequence) -> None:
        """Its adapter is in the pool now, so its line is among those inside, whoever else is looked at."""
        self._inside.push(self._account_of(sequence).lines[sequence.adapter])

    def next_adapters(self, limit: int) -> list[Adapter]:
        """Adapters outside the pool that wait for their turn: those that are not ready, then the others in the order of their turns."""
        ready = [sequence.adapter for sequence in islice(self, limit) if sequence.adapter and not sequence.adapter.page_ids]
        loading = [line.adapter for line in islice(self._loading, limit) if line.adapter]
        return (loading + ready)[:limit]

    def _floor(self) -> float:
        """The least that any adapter was served which runs, or a little more than one that could start; while none can, the least of those
        that wait."""
        running, fronts = [account.served for account in self._running.values()], self._fronts()
        if running:
            return min([*running, *(served + self._max_credit for served in fronts)])
        return min(fronts or [account.served for account in self._accounts.values()], default=0.0)

    def _level(self, newcomer: Account) -> float:
        """The least that any adapter was served which waits and could start; while none does, what the one was that started last."""
        return min(self._fronts(), default=(self._latest or newcomer).served)

    def _fronts(self) -> list[float]:
        """The least that any adapter with a line was served, of each lane."""
        lanes = self._inside, self._outside
        for lane in lanes:
            lane.restore()
        return [entry[0][0] for lane in lanes if (entry := lane.front())]

    def _lanes(self) -> tuple[Lane, ...]:
        return (self._inside, self._outside) if self._is_outside_shown else (self._inside,)

    def _lane_of(self, line: Line) -> Lane:
        return self._inside if line.adapter is None or line.adapter.page_ids else self._outside

    def _insert(self, sequence: Sequence) -> None:
        account = self._account_of(sequence)
        if account.num_running and not account.num_waiting:
            account.served = max(account.served, self._level(account) - self._max_credit)
        line = account.lines.get(sequence.adapter)
        if line is None:
            line = account.lines[sequence.adapter] = Line(account, sequence.adapter)
        line.insert(sequence)
        if line.head is sequence and line not in self._loading:
            self._lane_of(line).push(line)
        account.num_waiting += 1
        self._count_waiting(sequence, 1)

    def _remove(self, sequence: Sequence) -> None:
        account = self._account_of(sequence)
        line = account.lines[sequence.adapter]
        del line.sequences[sequence]
        if not line.sequences:
            line.entry = None
            self._loading.pop(line, None)
            del account.lines[sequence.adapter]
        account.num_waiting -= 1
        self._count_waiting(sequence, -1)

    def _count_waiting(self, sequence: Sequence, count: int) -> None:
        name = adapter_name(sequence.adapter)
        self._num_waiting += count
        self._num_waiting_of[name] += count
        if not self._num_waiting_of[name]:
            del self._num_waiting_of[name]

    def _stop(self, sequence: Sequence) -> None:
        self._count_running(self._account_of(sequence), -1)

    def _count_running(self, account: Account, count: int) -> None:
        account.num_running += count
        if account.num_running:
            self._running[account.name] = account
        else:
            self._running.pop(account.name, None)
