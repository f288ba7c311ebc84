"""What a driver replica knows of one adapter id: its newest version, its requests, and the status that they make. Looks nothing up."""

from dataclasses import dataclass
from typing import NamedTuple

from loray.deployments.adapter_status import AdapterState, AdapterStatus, TierUse
from loray.deployments.adapter_tiers import AdapterPlace
from loray.deployments.adapters import Adapter
from loray.deployments.request import AdapterRef


class DiskPlace(NamedTuple):
    """What of an adapter is on disk."""

    num_bytes: int
    is_private: bool
    use: TierUse


@dataclass(eq=False, slots=True)
class AdapterUse:
    ref: AdapterRef  # without anybody's token
    adapter: Adapter | None = None  # its newest version
    found: int = 0  # number of the search that found it
    num_running: int = 0
    num_served: int = 0
    num_failed: int = 0
    last_used: float = 0.0  # seconds since 1970
    is_loading: bool = False
    error: str = ""  # why the last load failed
    failed_at: float = 0.0  # when, by the monotonic clock
    last_failure: str = ""  # of its requests, until one is served

    @property
    def path(self) -> str:
        return self.adapter.path if self.adapter else ""

    @property
    def version(self) -> str:
        return self.adapter.version if self.adapter else ""

    def status(self, place: AdapterPlace | None, page_bytes: int, state: AdapterState | None, on_disk: DiskPlace) -> AdapterStatus:
        """`place` is its version's; `state` wins over what the place says."""
        return AdapterStatus(
            adapter_id=self.ref.adapter_id,
            source=self.ref.source,
            revision=self.ref.revision,
            version=self.version,
            state=state or self._state(place),
            rank=self.adapter.rank if self.adapter else 0,
            is_pinned=bool(place and place.is_pinned),
            is_private=on_disk.is_private,
            is_merge=self.ref.merge is not None,
            gpu_bytes=place.num_pages * page_bytes if place else 0,
            host_bytes=place.host_bytes if place else 0,
            disk_bytes=on_disk.num_bytes,
            num_running=self.num_running,
            num_served=self.num_served,
            num_failed=self.num_failed,
            last_used=self.last_used,
            gpu_use=place.pool_use if place else TierUse(),
            host_use=place.host_use if place else TierUse(),
            disk_use=on_disk.use,
            error=self.error,
            last_failure=self.last_failure,
        )

    def _state(self, place: AdapterPlace | None) -> AdapterState:
        if place and place.num_pages:
            return "gpu"
        if place and place.host_bytes:
            return "host"
        if place and place.is_loading:
            return "loading"
        return "failed" if self.error else "known"
