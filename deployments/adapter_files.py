"""Finds adapters by name in the configured folders and checks their files. Blocking: call it off the event loop."""

import contextlib
import dataclasses
import hashlib
import os
from collections import OrderedDict
from pathlib import Path

from loray.deployments.adapters import Adapter
from loray.deployments.errors import AdapterFailed, AdapterNotFound
from loray.models.adapter import PAGE_RANK, AdapterError, read_adapter, signature

MAX_REMEMBERED = 10_000  # validated versions


class AdapterFiles:
    """An id is a folder's name below a root, or an absolute path that lies in one after following links."""

    def __init__(self, roots: list[Path], lora_shapes: dict[str, tuple[int, int]]) -> None:
        self._roots = roots
        self._lora_shapes = lora_shapes
        self._validated: OrderedDict[str, Adapter] = OrderedDict()  # by path, most recently used last

    def find(self, adapter_id: str) -> Adapter:
        """The adapter as its files are now: a folder dropped in, replaced or removed since counts at once."""
        path = self._locate(adapter_id)
        try:
            files = signature(path)
            known = self._validated.get(str(path))
            if known is None or known.signature != files:
                known = self._validate(adapter_id, path, files)
        except (AdapterError, OSError) as error:
            raise AdapterFailed(str(error) if isinstance(error, AdapterError) else f"adapter {adapter_id!r}: {error}") from error
        self._remember(known)
        return dataclasses.replace(known, adapter_id=adapter_id, page_ids=[])

    def names(self) -> list[str]:
        """Every adapter that lies in a root."""
        return sorted({entry.parent.name for root in self._roots for entry in root.glob("*/adapter_config.json")})

    def _locate(self, adapter_id: str) -> Path:
        with contextlib.suppress(OSError, ValueError):  # a name that no file system can hold
            for root in self._roots:
                path, top = Path(os.path.realpath(root / adapter_id)), Path(os.path.realpath(root))
                if path != top and path.is_relative_to(top) and (path / "adapter_config.json").is_file():
                    return path
        roots = ", ".join(f"{root.parent.name}/{root.name}" for root in self._roots)
        raise AdapterNotFound(f"adapter {adapter_id!r} is not in any of the folders this server reads ({roots})")

    def _validate(self, adapter_id: str, path: Path, files: str) -> Adapter:
        spec = read_adapter(path, self._lora_shapes)
        digest = hashlib.blake2b(digest_size=16)
        for name in ("adapter_config.json", "adapter_model.safetensors"):
            with open(path / name, "rb") as file:
                while chunk := file.read(1 << 20):
                    digest.update(chunk)
        num_pages = -(-spec.rank // PAGE_RANK)
        return Adapter(adapter_id, digest.hexdigest(), str(path), num_pages, signature=files)

    def _remember(self, adapter: Adapter) -> None:
        self._validated[adapter.path] = adapter
        self._validated.move_to_end(adapter.path)
        if len(self._validated) > MAX_REMEMBERED:
            self._validated.popitem(last=False)
