"""Which grammars the ranks have compiled, and whose sequences wait for one. Pure bookkeeping: never touches grammars themselves.

Compiling takes up to seconds, beside the steps. It keeps to its bytes: what is to be compiled waits until there is room, and room is made
by dropping what no sequence needs, the least recently wanted first.
"""

from collections import OrderedDict
from dataclasses import dataclass, field

from loray.deployments.sequence import Sequence
from loray.models.step import grammar_key

MAX_BYTES = 512 << 20  # on each rank, less than one grammar's more
MAX_COMPILING = 4  # at once; each rank has two threads for it


@dataclass(eq=False, slots=True)
class _Entry:
    grammar: bytes
    users: set[Sequence] = field(default_factory=set)
    is_here: bool = False
    num_bytes: int = 0


class RankGrammars:
    def __init__(self) -> None:
        self._entries: OrderedDict[bytes, _Entry] = OrderedDict()  # by key, least recently wanted first
        self._unordered: dict[bytes, _Entry] = {}  # those that wait for their turn to be compiled
        self._num_bytes = 0
        self._num_compiling = 0
        self._drops: list[bytes] = []

    def want(self, sequence: Sequence) -> None:
        """Nothing happens to one without a grammar; another waits until the ranks have its own."""
        grammar = sequence.request.sampling.grammar
        if not grammar:
            return
        key = grammar_key(grammar)
        if key not in self._entries:
            self._entries[key] = self._unordered[key] = _Entry(grammar)
        entry = self._entries[key]
        if entry.is_here:  # else it keeps its turn
            self._entries.move_to_end(key)
        entry.users.add(sequence)
        sequence.waits_for_grammar = not entry.is_here

    def release(self, sequence: Sequence) -> None:
        """It needs its grammar no more."""
        grammar = sequence.request.sampling.grammar
        key = grammar_key(grammar) if grammar else b""
        if entry := self._entries.get(key):
            entry.users.discard(sequence)
            if not entry.users and key in self._unordered:
                del self._entries[key], self._unordered[key]

    def arrived(self, key: bytes, num_bytes: int, error: str) -> None:
        """All ranks are through with it. Where one failed, its sequences run all the same: that rank says why they can't."""
        entry = self._entries[key]
        self._num_compiling -= 1
        entry.is_here = True
        entry.num_bytes = num_bytes
        self._num_bytes += num_bytes
        for sequence in entry.users:
            sequence.waits_for_grammar = False
        if error:
            self._drop(key)

    def take_orders(self) -> tuple[list[bytes], list[bytes]]:
        """Grammars that the ranks are to compile and the keys of those to drop, since the last call; never the same in both."""
        if self._num_bytes >= MAX_BYTES:  # else nobody looks at them all
            for key in [key for key, entry in self._entries.items() if entry.is_here and not entry.users]:
                if self._num_bytes >= MAX_BYTES:
                    self._drop(key)
        ordered = []
        for key in [key for key in self._unordered if key not in self._drops]:
            if self._num_compiling >= MAX_COMPILING or self._num_bytes >= MAX_BYTES:
                break
            self._num_compiling += 1
            ordered.append(self._unordered.pop(key).grammar)
        drops, self._drops = self._drops, []
        return ordered, drops

    def _drop(self, key: bytes) -> None:
        self._num_bytes -= self._entries.pop(key).num_bytes
        self._drops.append(key)
