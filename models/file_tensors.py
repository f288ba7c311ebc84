"""Tensors of a safetensors file, read outside the interpreter's lock. Not mapped: a file that is cut short would end the process."""

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from io import FileIO
from pathlib import Path

import torch
from torch import Tensor

from loray.models.adapter_header import TensorPlace
from loray.models.host_memory import host_tensor

DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class FileTensors:
    """Those at these places, all read at once: what lies side by side in one go, and nothing copied."""

    def __init__(self, file: Path, places: Mapping[str, TensorPlace]) -> None:
        self._places = places
        with FileIO(file) as opened:
            runs = {begin: _read(opened, begin, end) for begin, end in _runs(places.values())}
        self._begins, self._contents = list(runs), list(runs.values())  # [bytes] uint8 each

    def __getitem__(self, name: str) -> Tensor:
        """A view, except where it does not begin at a multiple of its elements' size."""
        place = self._places[name]
        dtype = DTYPES[place.dtype]
        run = bisect_right(self._begins, place.begin) - 1
        begin = place.begin - self._begins[run]
        part = self._contents[run][begin : begin + place.end - place.begin]
        return (part.clone() if begin % dtype.itemsize else part).view(dtype).view(place.shape)


def rows_of(file: Path, place: TensorPlace, rows: range, num_at_once: int) -> Iterator[Tensor]:
    """Of a matrix that is not to be held whole."""
    width = (place.end - place.begin) // place.shape[0]
    with FileIO(file) as opened:
        for start in range(rows.start, rows.stop, num_at_once):
            begin, end = (place.begin + row * width for row in (start, min(start + num_at_once, rows.stop)))
            yield _read(opened, begin, end).view(DTYPES[place.dtype]).view(-1, *place.shape[1:])


def _runs(places: Iterable[TensorPlace]) -> list[tuple[int, int]]:
    """Where bytes that are wanted begin and end."""
    runs: list[tuple[int, int]] = []
    for begin, end in sorted((place.begin, place.end) for place in places):
        if runs and begin <= runs[-1][1]:
            runs[-1] = runs[-1][0], max(runs[-1][1], end)
        else:
            runs.append((begin, end))
    return runs


def _read(file: FileIO, begin: int, end: int) -> Tensor:
    content = host_tensor(end - begin, torch.uint8)
    rest = content.numpy().data
    file.seek(begin)
    while len(rest) and (num_read := file.readinto(rest)):
        rest = rest[num_read:]
    if len(rest):
        raise OSError(f"{Path(str(file.name)).name} became shorter while it was read")
    return content
