"""Makes one adapter of several in the disk cache, where it is kept like a download. Knows neither recipes nor who asks."""

from collections.abc import Callable, Sequence
from pathlib import Path

from loray.deployments.adapter_files import AdapterFiles
from loray.deployments.adapter_sources import FILES, Place
from loray.deployments.adapters import Adapter
from loray.deployments.disk_cache import DiskCache, Entry
from loray.deployments.errors import AdapterFailed
from loray.deployments.request import AdapterRef
from loray.models.adapter import AdapterError

MERGE_BYTES = 1 << 20  # room for a merge's names and ranks, beyond its values


def merge_into(
    cache: DiskCache, files: AdapterFiles, place: Place, ref: AdapterRef, parts: Sequence[Adapter], merge: Callable[[Path], None]
) -> Adapter:
    """For who is the only one of the place's key. merge: writes a folder, and raises AdapterError. Raises AdapterFailed and DiskFull.

    ref: without a token."""
    num_bytes = sum((Path(part.path) / name).stat().st_size for part in parts for name in FILES)
    with cache.staging(place.key, 2 * num_bytes + MERGE_BYTES) as folder:  # halves become float32
        try:
            merge(folder / "merged")
        except AdapterError as error:
            raise AdapterFailed(f"adapter {place.address!r}: {error}") from error
        for part in parts:
            if files.check(part.adapter_id, Path(part.path)).signature != part.signature:
                raise AdapterFailed(f"adapter {place.address!r}: {part.adapter_id!r} has changed while it was merged; try again")
        version = files.check(place.address, folder / "merged").version
        is_private = any(part.is_private for part in parts)
        path = cache.publish(place.key, folder / "merged", Entry("", version, "", is_private, ref))
    return files.check(place.address, path)
