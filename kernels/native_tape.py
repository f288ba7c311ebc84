"""Calls of native.c's functions, recorded as they are made, and made again by one call: what Python costs between them is paid once.

Where the first calls had a buffer for each of their answers, the recorded ones share an arena: a buffer's place is free again after the
last call that reads it.
"""

import struct
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from loray.kernels.native_library import CALL_WORDS, FUNCTIONS, NUMBERS

ALIGNMENT = 16  # floats


@dataclass(frozen=True, slots=True)
class Recorded:
    """Who made it keeps the tensors that its calls read and write, except the arena."""

    output: Tensor  # of the last replay
    _calls: Tensor  # [calls, CALL_WORDS] int64
    _replay: Callable[[int, int], None]

    def replay(self) -> None:
        self._replay(self._calls.data_ptr(), len(self._calls))


@dataclass(slots=True)
class _Buffer:
    tensor: Tensor
    first_call: int = -1  # -1 = none
    last_call: int = -1
    place: int = 0  # in the arena, in floats


class Tape:
    def __init__(self) -> None:
        self._calls: list[tuple[str, Sequence[float | None]]] = []
        self._buffers: list[_Buffer] = []
        self._watch = _Watch()

    @property
    def is_whole(self) -> bool:
        """Whether nothing but the calls has computed anything."""
        return not self._watch.has_computed

    @contextmanager
    def watched(self) -> Iterator[None]:
        with self._watch:
            yield

    def empty(self, shape: Sequence[int]) -> Tensor:
        self._watch.is_ours = True
        tensor = torch.empty(tuple(shape))
        self._watch.is_ours = False
        self._buffers.append(_Buffer(tensor))
        return tensor

    def add(self, name: str, arguments: Sequence[float | None]) -> None:
        self._calls.append((name, arguments))

    def recorded(self, output: Tensor, replay: Callable[[int, int], None]) -> Recorded:
        buffers = sorted((buffer for buffer in self._buffers if buffer.tensor.numel()), key=lambda buffer: buffer.tensor.data_ptr())
        starts = [buffer.tensor.data_ptr() for buffer in buffers]

        def buffer_of(address: int) -> _Buffer | None:
            index = bisect_right(starts, address) - 1
            return buffers[index] if index >= 0 and address < starts[index] + buffers[index].tensor.nbytes else None

        for number, (name, arguments) in enumerate(self._calls):
            for kind, argument in zip(FUNCTIONS[name], arguments, strict=True):
                if kind == "pointer" and argument and (buffer := buffer_of(int(argument))) is not None:
                    buffer.first_call = number if buffer.first_call < 0 else buffer.first_call
                    buffer.last_call = number
        kept = buffer_of(output.data_ptr())
        assert kept is not None and output.is_contiguous(), "the output is one of the calls', and whole"
        kept.last_call = len(self._calls)
        arena = torch.empty(_arrange(buffers))

        def moved(address: int) -> int:
            buffer = buffer_of(address)
            return address if buffer is None else arena.data_ptr() + 4 * buffer.place + address - buffer.tensor.data_ptr()

        calls = torch.zeros(len(self._calls), CALL_WORDS, dtype=torch.int64)
        for row, (name, arguments) in zip(calls.numpy(), self._calls, strict=True):
            row[0] = NUMBERS[name]
            for place, (kind, argument) in enumerate(zip(FUNCTIONS[name], arguments, strict=True), 1):
                row[place] = _word(argument) if kind == "float" else moved(int(argument or 0)) if kind == "pointer" else argument
        first = kept.place + (output.data_ptr() - kept.tensor.data_ptr()) // 4
        return Recorded(arena[first : first + output.numel()].view(output.shape), calls, replay)


class Recording(threading.local):
    """Of each thread its own: one that reads an adapter computes beside the one that records."""

    tape: Tape | None = None


class _Watch(TorchDispatchMode):
    """Notices what torch computes: all but views and buffers that the tape knows of. Of what comes from numpy torch tells nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.has_computed = False
        self.is_ours = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        returns = func._schema.returns
        is_view = bool(returns) and all(value.alias_info is not None and not value.alias_info.is_write for value in returns)
        self.has_computed |= not is_view and not self.is_ours
        return func(*args, **(kwargs or {}))


def _arrange(buffers: Sequence[_Buffer]) -> int:
    """Gives each a place that no other has while it is in use; how many floats that takes."""
    taken: list[tuple[int, int, int]] = []  # place, end, last call; by place
    size = 0
    for buffer in sorted((buffer for buffer in buffers if buffer.first_call >= 0), key=lambda buffer: buffer.first_call):
        taken = [each for each in taken if each[2] >= buffer.first_call]
        wanted = -(-prod(buffer.tensor.shape) // ALIGNMENT) * ALIGNMENT
        place = 0
        for start, end, _ in taken:
            if place + wanted <= start:
                break
            place = max(place, end)
        buffer.place = place
        taken = sorted([*taken, (place, place + wanted, buffer.last_call)])
        size = max(size, place + wanted)
    return size


def _word(number: float | None) -> int:
    return int(struct.unpack("<i", struct.pack("<f", number))[0])
