"""Remembers what was found in adapters that are alike but for their weights: a recipe's thousand adapters are understood once."""

import hashlib
import os
from collections import OrderedDict
from pathlib import Path
from threading import Lock

from loray.models.adapter import AdapterSpec, Shapes, read_adapter
from loray.models.adapter_config import CONFIG_FILE, MAX_CONFIG_BYTES
from loray.models.adapter_header import MAX_HEADER_BYTES, WEIGHTS_FILE

MAX_REMEMBERED = 64


class AdapterSpecs:
    """Any thread may read."""

    def __init__(self, lora_shapes: Shapes) -> None:
        self._lora_shapes = lora_shapes
        self._known: OrderedDict[bytes, AdapterSpec] = OrderedDict()  # by likeness, most recently used last
        self._lock = Lock()  # never held while files are read

    def read(self, folder: Path) -> AdapterSpec:
        """As `read_adapter`."""
        likeness = _likeness(folder)
        with self._lock:
            if likeness in self._known:
                self._known.move_to_end(likeness)
                return self._known[likeness]
        spec = read_adapter(folder, self._lora_shapes)
        if likeness and likeness == _likeness(folder):  # else other files came meanwhile, and the spec may be theirs
            with self._lock:
                self._known[likeness] = spec
                if len(self._known) > MAX_REMEMBERED:
                    self._known.popitem(last=False)
        return spec


def _likeness(folder: Path) -> bytes:
    """Of everything that a spec depends on; empty where that can't be read or is too much to be right."""
    digest = hashlib.blake2b(digest_size=16)
    if not all((folder / name).is_file() for name in (CONFIG_FILE, WEIGHTS_FILE)):  # a pipe would be waited for
        return b""
    try:
        with open(folder / CONFIG_FILE, "rb") as config, open(folder / WEIGHTS_FILE, "rb") as weights:
            header_size = int.from_bytes(weights.read(8), "little")
            if os.fstat(config.fileno()).st_size > MAX_CONFIG_BYTES or header_size > MAX_HEADER_BYTES:
                return b""
            for part in (config.read(MAX_CONFIG_BYTES), weights.read(header_size)):
                digest.update(len(part).to_bytes(8, "little") + part)
            digest.update(os.fstat(weights.fileno()).st_size.to_bytes(8, "little") + header_size.to_bytes(8, "little"))
    except OSError:
        return b""
    return digest.digest()
