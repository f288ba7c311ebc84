"""Lines of waiting sequences, one for each version of an adapter, and the order of their turns. fair_queue.py says whose turn it is."""

from collections import OrderedDict
from heapq import heapify, heappop, heappush
from itertools import count

from loray.deployments.adapters import Adapter
from loray.deployments.sequence import Sequence

MAX_DEAD_ENTRIES = 64  # of a lane, beyond as many as it has live ones


class Account:
    """What one adapter was served, and what it has here, all its versions together."""

    def __init__(self, name: str, weight: float, served: float) -> None:
        self.name = name
        self.weight = weight
        self.served = served  # tokens, divided by the weight
        self.began = served  # where it would have been when it last began to wait, without a head start
        self.credit = 0.0  # by how much it was behind the clock, its head start aside, when it last had nothing waiting any more
        self.lines: dict[Adapter | None, Line] = {}  # by version; none is empty
        self.prompts: set[Sequence] = set()  # that run and are not computed whole
        self.num_waiting = 0
        self.num_running = 0
        self.is_sated = False  # it only decodes, and takes less than its share
        self.is_active = False  # the clock counts it

    @property
    def stands_in_line(self) -> bool:
        """Something of it waits for more than its adapter."""
        return any(line.entry for line in self.lines.values())


class Line:
    """The waiting sequences of one version, oldest first. A version that can't start holds up no other."""

    def __init__(self, account: Account, adapter: Adapter | None) -> None:
        self.account = account
        self.adapter = adapter
        self.sequences: OrderedDict[Sequence, None] = OrderedDict()
        self.entry: Entry | None = None  # its live one; None = in no lane

    @property
    def head(self) -> Sequence:
        return next(iter(self.sequences))

    def insert(self, sequence: Sequence) -> None:
        youngest = next(reversed(self.sequences), sequence)
        self.sequences[sequence] = None
        if sequence.arrival < self.head.arrival:
            self.sequences.move_to_end(sequence, last=False)
        elif sequence.arrival < youngest.arrival:  # it gave way after an older one, or waited for its grammar
            self.sequences = OrderedDict.fromkeys(sorted(self.sequences, key=lambda one: one.arrival))

    @property
    def turn(self) -> tuple[float, int]:
        """The least comes first: of versions of one adapter, the one whose next sequence is the oldest."""
        return self.account.served, self.head.arrival


Entry = tuple[tuple[float, int], int, Line]  # the line's turn when it was made, and a number that no other has


class Lane:
    """Lines, by their turns. An entry that a charge, or a head that left, has made too low is put right when it gets to the front."""

    def __init__(self) -> None:
        self._heap: list[Entry] = []
        self._numbers = count()
        self._passed: list[Entry] = []
        self._num_kept = 0  # entries when the dead were last removed

    def push(self, line: Line) -> None:
        line.entry = (line.turn, next(self._numbers), line)
        heappush(self._heap, line.entry)
        if len(self._heap) > 2 * self._num_kept + MAX_DEAD_ENTRIES:
            self._heap = [entry for entry in self._heap if entry[-1].entry is entry]
            heapify(self._heap)
            self._num_kept = len(self._heap)

    def lines(self) -> list[Line]:
        return [entry[-1] for entry in (*self._heap, *self._passed) if entry[-1].entry is entry]

    def front(self) -> Entry | None:
        while self._heap:
            entry = self._heap[0]
            line = entry[-1]
            if line.entry is entry and entry[0] == line.turn:
                return entry
            heappop(self._heap)
            if line.entry is entry:
                self.push(line)
        return None

    def pass_front(self) -> None:
        """Leave it out until `restore`."""
        self._passed.append(heappop(self._heap))

    def restore(self) -> None:
        for entry in self._passed:
            if entry[-1].entry is entry:
                heappush(self._heap, entry)
        self._passed.clear()
