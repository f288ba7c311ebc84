"""Finds adapters by name in the configured folders and checks the files of any. Blocking: call it off the event loop."""

import contextlib
import dataclasses
import errno
import hashlib
import logging
import os
import threading
from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path

from loray.deployments.adapter_room import ANY_ROOM, AdapterRoom
from loray.deployments.adapter_template import MAX_BYTES, template_stamp
from loray.deployments.adapters import Adapter
from loray.deployments.errors import AdapterFailed, AdapterNotFound
from loray.deployments.expiring import Expiring
from loray.deployments.keyed_lock import KeyedLock
from loray.models.adapter import AdapterError, Shapes, rank_in_config, signature
from loray.models.adapter_config import CONFIG_FILE, check_config_size
from loray.models.adapter_header import WEIGHTS_FILE
from loray.models.adapter_specs import AdapterSpecs

logger = logging.getLogger("ray.serve.loray")

MAX_REMEMBERED = 10_000  # validated versions, and refused ones
REFUSED_S = 10.0
NUM_TRIES = 5  # of reading files that are replaced


class AdapterFiles:
    """An id is a folder's name below a root, or an absolute path that lies in one after following links. Many threads may ask at once."""

    def __init__(self, roots: list[Path], lora_shapes: Shapes, room: AdapterRoom = ANY_ROOM) -> None:
        self._roots = roots
        self._specs = AdapterSpecs(lora_shapes)
        self._lora_shapes, self._room = lora_shapes, room
        self._max_weights_bytes = room.max_weights_bytes(lora_shapes)
        self._validated: OrderedDict[str, Adapter] = OrderedDict()  # by path, most recently used last
        self._lock = threading.Lock()  # of _validated; never held while files are read
        self._validating = KeyedLock()
        self._refused: Expiring[tuple[str, str], str] = Expiring(REFUSED_S, MAX_REMEMBERED)  # by path and signature, why

    def find(self, adapter_id: str) -> Adapter:
        """The adapter as its files are now: a folder dropped in, replaced or removed since counts at once."""
        return self.check(adapter_id, self.locate(adapter_id))

    def check(self, adapter_id: str, path: Path) -> Adapter:
        """The folder as an adapter. Its files are read only when they are not those of the last time."""
        with _errors_of(adapter_id, path.name):
            known = self._known(path, signature(path))
            if known is None:
                with self._validating.only_one(str(path)):  # else many would read the same new files at once
                    known = self._read(adapter_id, path)
        return dataclasses.replace(known, adapter_id=adapter_id, page_ids=[], template_stamp=template_stamp(path))

    def check_sizes(self, adapter_id: str, sizes: Mapping[str, int]) -> None:
        """Of files that are not here yet, by their names."""
        with _errors_of(adapter_id):
            check_config_size(sizes[CONFIG_FILE])
        for name, max_bytes in MAX_BYTES.items():
            if sizes.get(name, 0) > max_bytes:
                raise AdapterFailed(f"adapter {adapter_id!r}: {name} has more than {max_bytes} bytes")
        if sizes[WEIGHTS_FILE] > self._max_weights_bytes:
            raise AdapterFailed(
                f"adapter {adapter_id!r}: {WEIGHTS_FILE} has {sizes[WEIGHTS_FILE]} bytes, more than there could ever be room for "
                f"({self._max_weights_bytes}): raise adapters.gpu_bytes and adapters.host_bytes"
            )

    def check_config(self, adapter_id: str, path: Path) -> None:
        """Raises what `check` would raise for the config, which is here before the weights."""
        with _errors_of(adapter_id):
            rank = rank_in_config(path, self._lora_shapes)
        self._room.pages_for(adapter_id, rank)

    def check_sum(self, adapter_id: str, paths: Sequence[Path]) -> None:
        """Raises if there could never be room for these adapters side by side, as a linear merge has them."""
        ranks: Counter[str] = Counter()
        for path in paths:
            with _errors_of(adapter_id, path.name):
                spec = self._specs.read(path)
            ranks.update({module: lora.rank for module, lora in spec.modules.items() if module not in spec.beyond_pages})
        self._room.pages_for(adapter_id, max(ranks.values(), default=1))

    def _known(self, path: Path, files: str) -> Adapter | None:
        with self._lock:
            known = self._validated.get(str(path))
            if known is None or known.signature != files:
                return None
            self._validated.move_to_end(str(path))
            return known

    def stamps(self, max_folders: int) -> dict[str, str]:
        """Every name that an adapter in a root may have -> what changes with its files, in whichever root. Reads none."""
        stamps: dict[str, str] = {}
        for number, root in enumerate(self._roots):
            with contextlib.suppress(OSError), os.scandir(root) as folders:
                for folder in islice(folders, max_folders):
                    with contextlib.suppress(OSError):
                        files = [folder.stat(), os.stat(f"{folder.path}/{CONFIG_FILE}")]
                        with contextlib.suppress(OSError):
                            files.append(os.stat(f"{folder.path}/{WEIGHTS_FILE}"))
                        stamp = ",".join(
                            f"{file.st_ino}-{file.st_size}-{file.st_ctime_ns}" for file in files
                        )  # also with who may read them
                        stamps[folder.name] = f"{stamps.get(folder.name, '')} {number}:{folder.inode()},{stamp}"
        return stamps

    def fits(self, path: Path) -> bool:
        """Whether its tensors have the base model's names and shapes, and there is room for it. Reads no weight: 7 ms where the header
        is long."""
        try:
            if self._known(path, signature(path)) is None:
                spec = self._specs.read(path)
                self._room.pages_for("", spec.rank, spec.extra_bytes)
        except (AdapterError, AdapterFailed, OSError):
            return False
        except Exception:  # whatever it is, the others are listed
            logger.exception("adapter folder %s can't be read", path)
            return False
        return True

    def locate(self, adapter_id: str) -> Path:
        """Its folder, which may be no adapter. Raises AdapterNotFound."""
        tops = [Path(os.path.realpath(root)) for root in self._roots]
        roots = ", ".join(f"{root.parent.name}/{root.name}" for root in self._roots)
        reason = ""
        for root in self._roots:
            with contextlib.suppress(OSError, ValueError):  # a name that no file system can hold, or a root that can't be read now
                path = Path(os.path.realpath(root / adapter_id))
                files = [Path(os.path.realpath(path / name)) for name in (CONFIG_FILE, WEIGHTS_FILE)]  # each may be a link of its own
                is_inside, *are_inside = (any(file.is_relative_to(top) for top in tops) for file in (path, *files))
                if not is_inside or path in tops or not path.is_dir():
                    continue
                if not all(are_inside):
                    reason = reason or "has files that are links out of the folders this server reads"
                elif files[0].is_file():
                    return path
                else:
                    reason = reason or f"has no {CONFIG_FILE} in its folder"
        raise AdapterNotFound(f"adapter {adapter_id!r} {reason or f'is not in any of the folders this server reads ({roots})'}")

    def _read(self, adapter_id: str, path: Path) -> Adapter:
        """Anew where the files were replaced meanwhile: what was read then may be of these, its signature of those."""
        for _ in range(NUM_TRIES):
            files = signature(path)
            adapter = self._known(path, files) or self._validate(adapter_id, path, files)
            if signature(path) == files:
                self._remember(adapter)
                return adapter
        raise AdapterError("its files are replaced again and again while they are read; try again")

    def _validate(self, adapter_id: str, path: Path, files: str) -> Adapter:
        if reason := self._refused.get((str(path), files)):
            raise AdapterError(reason)
        try:
            spec = self._specs.read(path)
        except AdapterError as error:  # some take a second to be found out
            self._refused.put((str(path), files), str(error))
            raise
        num_pages = self._room.pages_for(adapter_id, spec.rank, spec.extra_bytes)  # before the weights are read
        rank = max((lora.rank for lora in spec.modules.values()), default=spec.rank)  # also of those beyond the pages
        version = content_hash(path)
        return Adapter(adapter_id, version, str(path), num_pages, signature=files, rank=rank, extra_bytes=spec.extra_bytes)

    def _remember(self, adapter: Adapter) -> None:
        with self._lock:
            self._validated[adapter.path] = adapter
            self._validated.move_to_end(adapter.path)
            if len(self._validated) > MAX_REMEMBERED:
                self._validated.popitem(last=False)


@contextlib.contextmanager
def _errors_of(adapter_id: str, folder: str = "") -> Iterator[None]:
    """folder: its name, by which a message may call the adapter."""
    try:
        yield
    except (AdapterError, OSError) as error:
        reason = str(error).removeprefix(f"adapter {folder!r}: ")
        raise AdapterFailed(f"adapter {adapter_id!r}: {reason}") from error


def content_hash(path: Path) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        if not (path / name).is_file():  # a pipe would be waited for
            raise FileNotFoundError(errno.ENOENT, "No such file", name)
        with open(path / name, "rb") as file:
            while chunk := file.read(1 << 20):
                digest.update(chunk)
    return digest.hexdigest()
