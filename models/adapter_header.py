"""Reads the header of an adapter's safetensors file and checks it against the file's size. Never reads a weight."""

import math
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec

from loray.models.adapter_config import AdapterError, shown

WEIGHTS_FILE = "adapter_model.safetensors"
SIZE_BYTES = 8  # in which a file says how long its header is
# Strangers write headers, and all other threads wait while one is decoded: for tens of milliseconds at most.
MAX_HEADER_BYTES = 4 << 20
MAX_TENSORS = 20_000
MAX_ENTRY_BYTES = 1000
MAX_NAME_LEN = 512
MAX_DIMS = 8
DTYPES = {"F32": 4, "F16": 2, "BF16": 2}  # bytes of one element


Size = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]


class _Entry(msgspec.Struct):
    """Of one tensor, as its file tells it."""

    dtype: str
    shape: Annotated[tuple[Size, ...], msgspec.Meta(max_length=MAX_DIMS)]
    data_offsets: tuple[Size, Size]  # bytes, counted from the header's end


_HEADER = msgspec.json.Decoder(dict[str, msgspec.Raw])
_ENTRY = msgspec.json.Decoder(_Entry)


class TensorPlace(NamedTuple):
    """Where in its file a tensor lies, and as what."""

    dtype: str  # of DTYPES
    shape: tuple[int, ...]
    begin: int  # byte, counted from the file's start
    end: int


def read_places(folder: Path) -> dict[str, TensorPlace]:
    """By the tensors' names."""
    file = folder / WEIGHTS_FILE
    if not file.is_file():
        if (folder / "adapter_model.bin").exists():
            raise AdapterError(
                "adapter_model.bin is a pickle, which can run code and is never loaded; convert it where you trust it: "
                "safetensors.torch.save_file(torch.load('adapter_model.bin', weights_only=True), 'adapter_model.safetensors')"
            )
        raise AdapterError(f"{WEIGHTS_FILE} is missing, or no file")
    raw, file_size, data_size = _read(file)
    entries = {name: _entry(name, text, data_size) for name, text in raw.items()}
    _check_neighbours(entries, data_size)
    start = file_size - data_size
    return {name: _place(entry, start) for name, entry in entries.items()}


def _place(entry: _Entry, start: int) -> TensorPlace:
    begin, end = entry.data_offsets
    return TensorPlace(entry.dtype, entry.shape, start + begin, start + end)


def _read(file: Path) -> tuple[dict[str, msgspec.Raw], int, int]:
    """Tensor name -> its entry; the file's bytes, and those after the header."""
    try:
        with open(file, "rb") as opened:
            size = file.stat().st_size
            header_size = int.from_bytes(opened.read(SIZE_BYTES), "little")
            if size < SIZE_BYTES or header_size > size - SIZE_BYTES:
                raise AdapterError(f"{WEIGHTS_FILE} is cut short: {size} bytes cannot hold its header")
            if header_size > MAX_HEADER_BYTES:
                raise AdapterError(f"{WEIGHTS_FILE} has a header of {header_size} bytes, more than {MAX_HEADER_BYTES}")
            text = opened.read(header_size)
        if text.count(b":") > 4 * MAX_TENSORS:  # an entry has four
            raise AdapterError(f"{WEIGHTS_FILE} has a header with too many entries, more than {MAX_TENSORS}")
        header = _HEADER.decode(text)
    except OSError as error:
        raise AdapterError(f"{WEIGHTS_FILE} cannot be read: {error.strerror}") from None
    except RecursionError:
        raise AdapterError(f"{WEIGHTS_FILE} is corrupt: its header is nested too deeply") from None
    except ValueError:  # msgspec's too
        raise AdapterError(f"{WEIGHTS_FILE} is corrupt: its header is no map of tensors in JSON") from None
    header.pop("__metadata__", None)
    if not header:
        raise AdapterError(f"{WEIGHTS_FILE} holds no tensors")
    return header, size, size - SIZE_BYTES - header_size


def _entry(name: str, text: msgspec.Raw, data_size: int) -> _Entry:
    if len(name) > MAX_NAME_LEN or not name.isprintable():
        raise AdapterError(f"{WEIGHTS_FILE} is corrupt: a tensor is called {shown(name)}, which is no name")
    if len(memoryview(text)) > MAX_ENTRY_BYTES:
        raise AdapterError(f"{WEIGHTS_FILE} is corrupt: the entry of {name} has more than {MAX_ENTRY_BYTES} bytes")
    try:
        entry = _ENTRY.decode(text)
    except ValueError as error:
        raise AdapterError(f"{WEIGHTS_FILE} is corrupt: the entry of {name} cannot be understood: {error}") from None
    if entry.dtype not in DTYPES:
        raise AdapterError(f"{name} has dtype {shown(entry.dtype)}; only {', '.join(DTYPES)} are supported")
    begin, end = entry.data_offsets
    if end > data_size:
        raise AdapterError(f"{WEIGHTS_FILE} is cut short: {name} ends at byte {end} of {data_size}")
    if end - begin != math.prod(entry.shape) * DTYPES[entry.dtype]:
        raise AdapterError(f"{WEIGHTS_FILE} is corrupt: {name} has {end - begin} bytes, its shape {list(entry.shape)} needs another number")
    return entry


def _check_neighbours(entries: dict[str, _Entry], data_size: int) -> None:
    """Every byte belongs to one tensor."""
    previous = 0
    for begin, end, name in sorted((*entry.data_offsets, name) for name, entry in entries.items()):
        if begin != previous:
            raise AdapterError(f"{WEIGHTS_FILE} is corrupt: {name} begins at byte {begin}, and what is before it ends at {previous}")
        previous = end
    if previous != data_size:
        raise AdapterError(f"{WEIGHTS_FILE} is corrupt: it has {data_size} bytes of data, and its tensors end at {previous}")
