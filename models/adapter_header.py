"""Reads the header of an adapter's safetensors file and checks it against the file's size. Never reads a weight."""

import json
import math
from pathlib import Path
from typing import Any

from loray.models.adapter_config import AdapterError

WEIGHTS_FILE = "adapter_model.safetensors"
DTYPES = {"F32": 4, "F16": 2, "BF16": 2}  # bytes of one element


def read_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Tensor name -> shape."""
    file = folder / WEIGHTS_FILE
    if not file.is_file():
        if (folder / "adapter_model.bin").exists():
            raise AdapterError(
                "adapter_model.bin is a pickle, which can run code and is never loaded; convert it where you trust it: "
                "safetensors.torch.save_file(torch.load('adapter_model.bin', weights_only=True), 'adapter_model.safetensors')"
            )
        raise AdapterError(f"{WEIGHTS_FILE} is missing")
    header, data_size = _read(file)
    for name, entry in header.items():
        _check_entry(name, entry, data_size)
    if (used := sum(entry["data_offsets"][1] - entry["data_offsets"][0] for entry in header.values())) != data_size:
        raise AdapterError(f"{WEIGHTS_FILE} is corrupt: it has {data_size} bytes of data, and its tensors {used}")
    return {name: tuple(entry["shape"]) for name, entry in header.items()}


def _read(file: Path) -> tuple[dict[str, Any], int]:
    """Tensor name -> dtype, shape, data_offsets; and the bytes after the header."""
    try:
        with open(file, "rb") as opened:
            size = file.stat().st_size
            header_size = int.from_bytes(opened.read(8), "little")
            if size < 8 or header_size > size - 8:
                raise AdapterError(f"{WEIGHTS_FILE} is cut short: {size} bytes cannot hold its header")
            header = json.loads(opened.read(header_size))
    except (OSError, ValueError, RecursionError) as error:
        raise AdapterError(f"{WEIGHTS_FILE} is corrupt: {error}") from None
    if not isinstance(header, dict):
        raise AdapterError(f"{WEIGHTS_FILE} is corrupt: its header is not a JSON object")
    header.pop("__metadata__", None)
    if not header:
        raise AdapterError(f"{WEIGHTS_FILE} holds no tensors")
    return header, size - 8 - header_size


def _check_entry(name: str, entry: Any, data_size: int) -> None:
    try:
        dtype, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
        is_plain = all(type(number) is int and number >= 0 for number in (*shape, begin, end))
    except (TypeError, KeyError, ValueError):
        is_plain = False
    if not is_plain:
        raise AdapterError(f"{WEIGHTS_FILE} is corrupt: the entry of {name} cannot be understood")
    if dtype not in DTYPES:
        raise AdapterError(f"{name} has dtype {dtype}; only {', '.join(DTYPES)} are supported")
    if end > data_size:
        raise AdapterError(f"{WEIGHTS_FILE} is cut short: {name} ends at byte {end} of {data_size}")
    if end - begin != math.prod(shape) * DTYPES[dtype]:
        raise AdapterError(f"{WEIGHTS_FILE} is corrupt: {name} has {end - begin} bytes, its shape {shape} needs another number")
