"""Whose turn it is: the waiting sequences of each adapter, and the tokens each was served. Knows neither slots, blocks nor steps.

Virtual token counters (Sheng et al. 2024, "Fairness in Serving Large Language Models"): every computed token is charged to its adapter,
divided by the adapter's weight, and the adapter served least goes first. The base model is an adapter like any other, with the id "". One
that begins to wait, new or back, starts where fair_clock.py says, so that neither idle time nor the time it takes to load earns credit;
or where it was, if that is more, so that who asks for one answer after another pays for those before.

All versions of an adapter have one account, but for those that are pinned: they are always in the pool, and what they are served would
keep a version that is not from ever getting there.
"""

import math
from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping
from itertools import islice

from loray.deployments.adapters import Adapter
from loray.deployments.fair_clock import MAX_HEAD_START, FairClock
from loray.deployments.fair_lines import Account, Lane, Line
from loray.deployments.sequence import Sequence

MAX_CLOSED = 10_000
MAX_CREDIT = 2048  # tokens
NUM_CLOSED_LOOKED_AT = 8  # whenever an adapter's last request ends


def adapter_name(adapter: Adapter | None) -> str:
    """The same for all its versions."""
    return adapter.account or adapter.adapter_id if adapter else ""


def account_name(adapter: Adapter | None) -> str:
    return f"{adapter_name(adapter)}\0{adapter.version}" if adapter and adapter.is_apart else adapter_name(adapter)


class FairQueue:
    """Lines stand in one of two lanes, or aside while their adapter is not ready: what can't start is not looked at in each step."""

    def __init__(self, weights: Mapping[str, float]) -> None:
        assert all(weight > 0 for weight in weights.values()), "an adapter's weight is above 0"
        self._weights = weights  # by account, or by adapter id
        self._clock = FairClock()
        self._latest: Account | None = None  # that a sequence of was started
        self._accounts: dict[str, Account] = {}  # of the adapters that have requests, by name
        self._closed: OrderedDict[str, Account] = OrderedDict()  # of those that had some a while ago, by name
        self._inside, self._outside = Lane(), Lane()  # of the base model and the adapters in the pool; of the others
        self._is_outside_shown = True
        self._loading: dict[Line, None] = {}  # in the order in which they were found to be
        self._held: dict[Sequence, None] = {}  # whose grammars the ranks don't have yet: in no line, where they would hold others up
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

    def charge(self, sequence: Sequence, num_tokens: int) -> None:
        account = self._account_of(sequence)
        before, account.served = account.served, account.served + num_tokens / account.weight
        self._clock.advance(before, account.served, account.began, account.weight)
        if sequence.num_to_compute <= 1:
            account.prompts.discard(sequence)
        if not account.prompts and not account.stands_in_line:  # it is served all that it asks for
            start = self._start(account, 0)
            account.is_sated = account.served < start or (account.is_sated and account.served < self._clock.now)
            account.served = max(account.served, start)
            self._count_active(account)

    def refund(self, sequence: Sequence, num_tokens: int) -> None:
        """What was charged for a row that is not computed after all."""
        self.charge(sequence, -num_tokens)
        for line in self._account_of(sequence).lines.values():
            if line.entry:  # a lane finds the entries that are too low by itself, not those that are too high
                self._lane_of(line).push(line)

    def add(self, sequence: Sequence) -> None:
        if sequence.waits_for_grammar:
            self._held[sequence] = None
            self._count_held(sequence, 1)
            return
        if account_name(sequence.adapter) not in self._accounts:
            self._open(sequence.adapter)
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
            prompts = {sequence for sequence in old.prompts if sequence.adapter is adapter}
            old.prompts -= prompts
            new.prompts |= prompts
            self._count_running(old, -num_running)
            self._count_running(new, num_running)
            for sequence in waiting:
                self._insert(sequence)
            self._leave_if_unused(old)

    def take(self, sequence: Sequence) -> None:
        """It waits no longer, it runs."""
        account = self._account_of(sequence)
        account.prompts.add(sequence)
        self._count_running(account, 1)
        self._latest = account
        self._remove(sequence)
        line = account.lines.get(sequence.adapter)
        if line:
            self._lane_of(line).push(line)  # it may be in the pool from now on
        self._clock.catch_up(min([account.served, *self._fronts()]))

    def put_back(self, sequence: Sequence) -> None:
        """It runs no longer, and waits ahead of those of its version that came later."""
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
        self._count_held(sequence, -1)

    def _count_held(self, sequence: Sequence, change: int) -> None:
        self._count_waiting(sequence, change)
        if sequence.adapter:
            sequence.adapter.num_held += change

    def _account_of(self, sequence: Sequence) -> Account:
        return self._accounts[account_name(sequence.adapter)]

    def _open(self, adapter: Adapter | None, served: float = -math.inf) -> Account:
        """It has none, or a closed one, which may have been served more."""
        name = account_name(adapter)
        weight_by_id = self._weights.get(adapter.adapter_id, 1.0) if adapter else 1.0
        account = self._closed.pop(name, None) or Account(name, self._weights.get(adapter_name(adapter), weight_by_id), served)
        account.served = max(account.served, served)
        account.is_sated = False
        self._accounts[name] = account
        return account

    def _leave_if_unused(self, account: Account) -> None:
        if account.num_running or account.num_waiting:
            return
        del self._accounts[account.name]
        if not self._accounts:
            self._closed.clear()
            return
        oldest = list(islice(self._closed.values(), NUM_CLOSED_LOOKED_AT))  # a few each time, so that none costs much
        for other in oldest:
            del self._closed[other.name]
            if not self._is_forgotten(other) and len(self._closed) < MAX_CLOSED:
                self._closed[other.name] = other
        self._closed[account.name] = account

    def _is_forgotten(self, account: Account) -> bool:
        """Whether it would begin like a new one, whatever prompt comes."""
        credit = self._clock.head_start(MAX_HEAD_START, account.weight)
        return account.credit <= credit and account.served <= self._clock.now - credit

    def _start(self, account: Account, num_prompt: int) -> float:
        """What an adapter is at least taken to have been served when it begins to wait with so long a prompt."""
        return self._clock.now - max(self._clock.head_start(num_prompt, account.weight), account.credit)

    def _lift(self, account: Account, sequence: Sequence) -> None:
        """Of an adapter that begins to wait, with this sequence."""
        level = min(self._fronts(), default=self._latest.served if self._latest else 0.0)  # of those that wait, or that started last
        self._clock.catch_up(level)
        account.began = max(account.served, self._clock.now - account.credit)
        account.served = max(account.served, self._start(account, sequence.num_tokens))

    def wake_loaded(self) -> None:
        """Adapters that have become ready since the last call get in line, and so do sequences whose grammars have."""
        for sequence in [sequence for sequence in self._held if not sequence.waits_for_grammar]:
            self._let_go(sequence)
            self.add(sequence)
        for line in [line for line in self._loading if line.adapter and (line.adapter.is_ready or line.adapter.page_ids)]:
            del self._loading[line]
            if not line.account.stands_in_line:
                self._lift(line.account, line.head)
            self._lane_of(line).push(line)
            self._count_active(line.account)

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
                self._count_active(line.account)
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
        held = dict.fromkeys(sequence.adapter for sequence in self._held)
        return [adapter for adapter in held if adapter and adapter.page_ids and not adapter.is_awaited]

    def placed(self, sequence: Sequence) -> None:
        """Its adapter is in the pool now, so its line is among those inside, whoever else is looked at."""
        self._inside.push(self._account_of(sequence).lines[sequence.adapter])

    def next_adapters(self, limit: int) -> list[Adapter]:
        """Adapters outside the pool that wait for their turn: those that are not ready, then the others in the order of their turns."""
        ready = [sequence.adapter for sequence in islice(self, limit) if sequence.adapter and not sequence.adapter.page_ids]
        loading = [line.adapter for line in islice(self._loading, limit) if line.adapter]
        return (loading + ready)[:limit]

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
        if not account.stands_in_line:
            self._lift(account, sequence)
        line = account.lines.get(sequence.adapter)
        if line is None:
            line = account.lines[sequence.adapter] = Line(account, sequence.adapter)
        line.insert(sequence)
        if line.head is sequence and line not in self._loading:
            self._lane_of(line).push(line)
        account.num_waiting += 1
        self._count_waiting(sequence, 1)
        self._count_active(account)

    def _remove(self, sequence: Sequence) -> None:
        account = self._account_of(sequence)
        line = account.lines[sequence.adapter]
        stood_in_line = account.stands_in_line
        del line.sequences[sequence]
        if not line.sequences:
            line.entry = None
            self._loading.pop(line, None)
            del account.lines[sequence.adapter]
        account.num_waiting -= 1
        if stood_in_line and not account.stands_in_line:
            account.credit = min(max(self._clock.now - max(account.served, account.began), 0.0), MAX_CREDIT / account.weight)
        self._count_waiting(sequence, -1)
        self._count_active(account)

    def _count_waiting(self, sequence: Sequence, count: int) -> None:
        name = adapter_name(sequence.adapter)
        self._num_waiting += count
        self._num_waiting_of[name] += count
        if not self._num_waiting_of[name]:
            del self._num_waiting_of[name]

    def _stop(self, sequence: Sequence) -> None:
        account = self._account_of(sequence)
        account.prompts.discard(sequence)
        self._count_running(account, -1)

    def _count_running(self, account: Account, count: int) -> None:
        account.num_running += count
        self._count_active(account)

    def _count_active(self, account: Account) -> None:
        """The clock goes by those that stand in line, and those that run and take their share."""
        is_active = bool(account.prompts) or account.stands_in_line or (account.num_running > 0 and not account.is_sated)
        if is_active and not account.is_active:
            self._clock.count(account.weight)
        elif account.is_active and not is_active:
            self._clock.discount(account.weight)
        account.is_active = is_active
