"""Makes one adapter of several in the disk cache, where it is kept like a download. Knows not who asks."""

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from loray.deployments.adapter_files import AdapterFiles
from loray.deployments.adapter_sources import FILES, Place
from loray.deployments.adapters import Adapter
from loray.deployments.disk_cache import DiskCache, Entry
from loray.deployments.errors import AdapterChanged, AdapterFailed, Overloaded
from loray.deployments.request import AdapterRef, MergeRecipe
from loray.models.adapter import AdapterError, Shapes, signature
from loray.models.adapter_config import FilesChanged

MERGE_BYTES = 1 << 20  # room for a merge's names and ranks, beyond its values


Merge = Callable[[Sequence[Path], Sequence[float], dict[str, Any], Shapes, Path], None]  # folders, weights, method, shapes -> folder


def merge_place(ref: AdapterRef, parts: Sequence[Adapter]) -> Place:
    """The same for the same versions and recipe."""
    recipe = _recipe(ref)
    origin = msgspec.json.encode(([part.version for part in parts], recipe.weights, _method(recipe)))
    return Place("merge", ref.adapter_id, hashlib.blake2b(origin, digest_size=12).hexdigest())


def check_room(cache: DiskCache, ref: AdapterRef, parts: Sequence[Adapter]) -> None:
    """Raises AdapterFailed if there could never be room for these parts, and what may come of them, side by side."""
    sizes = {part.path: cache.bytes_at(part.path) for part in parts}
    num_bytes = sum(sizes.values()) + _most_bytes(sum(sizes[part.path] for part in parts))
    if num_bytes > cache.max_bytes:
        reason = f"with its parts it may take {num_bytes} bytes on disk, more than adapters.disk_bytes ({cache.max_bytes})"
        raise AdapterFailed(f"adapter {ref.adapter_id!r}: {reason}")


def merge_into(cache: DiskCache, files: AdapterFiles, ref: AdapterRef, parts: Sequence[Adapter], merge: Merge, shapes: Shapes) -> Adapter:
    """For who is the only one of the place's key. Raises AdapterFailed, AdapterChanged, Overloaded, DiskFull and DiskBusy.

    ref: without a token; merge: raises AdapterError."""
    place, recipe, folders = merge_place(ref, parts), _recipe(ref), [Path(part.path) for part in parts]
    _check_parts(place, parts)
    if recipe.strategy == "linear":  # the others are of no higher rank than their parts
        files.check_sum(place.address, folders)
    num_bytes = sum((folder / name).stat().st_size for folder in folders for name in FILES)
    with cache.staging(place.key, _most_bytes(num_bytes)) as folder:
        try:
            merge(folders, recipe.weights, _method(recipe), shapes, folder / "merged")
        except AdapterError as error:
            kind = AdapterChanged if isinstance(error, FilesChanged) else AdapterFailed
            raise kind(f"adapter {place.address!r}: {_by_id(str(error), parts)}") from error
        _check_parts(place, parts)
        version = files.check(place.address, folder / "merged").version
        is_private = any(part.is_private for part in parts)
        with cache.published(place.key, folder / "merged", Entry("", version, "", is_private, ref)) as path:
            return files.check(place.address, path)


def _most_bytes(num_bytes: int) -> int:
    """On disk. num_bytes: of its parts."""
    return 2 * num_bytes + MERGE_BYTES  # halves become float32


def _check_parts(place: Place, parts: Sequence[Adapter]) -> None:
    """Raises AdapterChanged and Overloaded."""
    for part in parts:
        files = signature(Path(part.path))
        if not files:
            raise Overloaded(f"adapter {place.address!r}: {part.adapter_id!r} has left the disk, where others needed room; try again")
        if files != part.signature:
            raise AdapterChanged(f"adapter {place.address!r}: {part.adapter_id!r} has changed while it was merged")


def _by_id(reason: str, parts: Sequence[Adapter]) -> str:
    """A download's folder is called by what is in it, which tells a caller nothing."""
    for part in parts:
        reason = reason.replace(repr(Path(part.path).name), repr(part.adapter_id))
    return reason


def _recipe(ref: AdapterRef) -> MergeRecipe:
    assert ref.merge is not None, "a merge has a recipe"
    return ref.merge


def _method(recipe: MergeRecipe) -> dict[str, Any]:
    return {"strategy": recipe.strategy, "density": recipe.density, "majority_sign": recipe.majority_sign}
