"""Brings one adapter from its source into the disk cache: the config first, so that what can't be served takes nobody's room or time."""

from collections.abc import Sequence
from pathlib import Path

from loray.deployments.adapter_files import AdapterFiles
from loray.deployments.adapter_sources import Offer, Place, Source
from loray.deployments.adapters import Adapter
from loray.deployments.disk_cache import DiskCache, Entry
from loray.deployments.download_log import logged
from loray.deployments.errors import AdapterFailed
from loray.models.adapter_config import CONFIG_FILE


def download(source: Source, place: Place, offer: Offer, files: AdapterFiles, cache: DiskCache, room_until: float, token: str) -> Adapter:
    """For who is the only one of the place's key. Raises AdapterNotFound, AdapterFailed, AdapterChanged, DiskFull and DiskBusy.

    room_until: how long room on disk is waited for, by the monotonic clock."""

    def fetch(names: Sequence[str], folder: Path) -> None:
        try:
            source.fetch(place, offer, names, token, folder)
            for name in names:
                if (num_bytes := (folder / name).stat().st_size) != offer.files[name]:
                    raise AdapterFailed(f"adapter {place.name!r}: {name} has {offer.files[name]} bytes, {num_bytes} came")
        except AdapterFailed:
            source.check_unchanged(place, offer, token)  # else that is why
            raise

    files.check_sizes(place.name, offer.files)
    with cache.staging(place.key) as folder:
        fetch([CONFIG_FILE], folder)
        files.check_config(place.name, folder)
        folder = cache.grow(folder, offer.num_bytes, room_until)
        with logged(place.name, folder, offer.num_bytes):
            fetch([name for name in offer.files if name != CONFIG_FILE], folder)
            source.check_unchanged(place, offer, token)
        version = files.check(place.name, folder).version
        with cache.published(place.key, folder, Entry(place.name, version, offer.stamp, offer.is_private)) as path:
            adapter = files.check(place.name, path)
    adapter.is_private = offer.is_private
    return adapter
