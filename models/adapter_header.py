"""Reads the header of an adapter's safetensors file and checks it against the file's size. Never reads a weight."""

import json
import math
from pathlib import Path
from typing import Any, NamedTuple

from loray.models.adapter_config import AdapterError, shown

WEIGHTS_FILE = "adapter_model.safetensors"
SIZE_BYTES = 8  # in which a file says how long its header is
MAX_HEADER_BYTES = 8 << 20  # forty thousand tensors
MAX_NAME_LEN = 512
MAX_DIMS = 8
DTYPES = {"F32": 4, "F16": 2, "BF16": 2}  # bytes of one element


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
    header, file_size, data_size = _read(file)
    for name, entry in header.items():
        _check_entry(name, entry, data_size)
    _check_neighbours(header, data_size)
    start = file_size - data_size
    return {name: _place(entry, start) for name, entry in header.items()}


def _place(entry: dict[str, Any], start: int) -> TensorPlace:
    begin, end = entry["data_offsets"]
    return TensorPlace(entry["dtype"], tuple(entry["shape"]), start + begin, start + end)


def _read(file: Path) -> tuple[dict[str, Any], int, int]:
    """Tensor name -> dtype, shape, data_offsets; the file's bytes, and those after the header."""
    try:
        with open(file, "rb") as opened:
            size = file.stat().st_size
            header_size = int.from_bytes(opened.read(SIZE_BYTES), "little")
            if size < SIZE_BYTES or header_size > size - SIZE_BYTES:
                raise AdapterError(f"{WEIGHTS_FILE} is cut short: {size} bytes cannot hold its header")
            if header_size > MAX_HEADER_BYTES:
                raise AdapterError(f"{WEIGHTS_FILE} has a header of {header_size} bytes, more than {MAX_HEADER_BYTES}")
            header = json.loads(opened.read(header_size))
    except OSError as error:
        raise AdapterError(f"{WEIGHTS_FILE} cannot be read: {error.strerror}") from None
    except RecursionError:
        raise AdapterError(f"{WEIGHTS_FILE} is corrupt: its header is nested too deeply") from None
    except ValueError as error:
        raise AdapterError(f"{WEIGHTS_FILE} is corrupt: {error}") from None
    if not isinstance(header, dict):
        raise AdapterError(f"{WEIGHTS_FILE} is corrupt: its header is not a JSON object")
    header.pop("__metadata__", None)
    if not header:
        raise AdapterError(f"{WEIGHTS_FILE} holds no tensors")
    return header, size, size - SIZE_BYTES - header_size


def _check_entry(name: str, entry: Any, data_size: int) -> None:
    if len(name) > MAX_NAME_LEN or not name.isprintable():
        raise AdapterError(f"{WEIGHTS_FILE} is corrupt: a tensor is called {shown(name)}, which is no name")
    fields: dict[str, Any] = entry if isinstance(entry, dict) else {}
    dtype, shape, offsets = (fields.get(field, "") for field in ("dtype", "shape", "data_offsets"))
    if not isinstance(dtype, str) or not _is_sizes(shape) or not _is_sizes(offsets) or len(offsets) != 2:
        raise AdapterError(f"{WEIGHTS_FILE} is corrupt: the entry of {name} cannot be understood: {shown(entry)}")
    if dtype not in DTYPES:
        raise AdapterError(f"{name} has dtype {shown(dtype)}; only {', '.join(DTYPES)} are supported")
    begin, end = offsets
    if end > data_size:
        raise AdapterError(f"{WEIGHTS_FILE} is cut short: {name} ends at byte {end} of {data_size}")
    if end - begin != math.prod(shape) * DTYPES[dtype]:
        raise AdapterError(f"{WEIGHTS_FILE} is corrupt: {name} has {end - begin} bytes, its shape {shape} needs another number")


def _check_neighbours(header: dict[str, Any], data_size: int) -> None:
    """Every byte belongs to one tensor."""
    previous = 0
    for begin, end, name in sorted((*entry["data_offsets"], name) for name, entry in header.items()):
        if begin != previous:
            raise AdapterError(f"{WEIGHTS_FILE} is corrupt: {name} begins at byte {begin}, and what is before it ends at {previous}")
        previous = end
    if previous != data_size:
        raise AdapterError(f"{WEIGHTS_FILE} is corrupt: it has {data_size} bytes of data, and its tensors end at {previous}")


def _is_sizes(value: Any) -> bool:
    return isinstance(value, list) and len(value) <= MAX_DIMS and all(type(size) is int and 0 <= size < 1 << 63 for size in value)
