"""What an adapter takes, and whether there could ever be room for it. Pure: knows neither files nor what is loaded."""

from dataclasses import dataclass

from loray.deployments.errors import AdapterFailed
from loray.models.adapter import PAGE_RANK, Shapes, most_weights_bytes


@dataclass(frozen=True, slots=True)
class AdapterRoom:
    """Of a server that holds nothing yet."""

    num_pages: int  # in the pool
    page_bytes: int  # of the rank that needs most
    host_bytes: int

    def pages_for(self, adapter_id: str, rank: int, extra_bytes: int = 0) -> int:
        """Raises AdapterFailed if there is no room for it."""
        # What it has beside its pages takes the pool's room too, so that the device's memory is bounded.
        num_pages = max(-(-rank // PAGE_RANK), -(-extra_bytes // max(self.page_bytes, 1)))
        if num_pages > self.num_pages:
            raise too_many_pages(adapter_id, num_pages, self.num_pages)
        if num_pages * self.page_bytes + extra_bytes > self.host_bytes:
            raise too_many_bytes(adapter_id, self.host_bytes)
        return num_pages

    def max_weights_bytes(self, lora_shapes: Shapes) -> int:
        """A file with more holds no adapter that there is room for."""
        num_pages = min(self.num_pages, self.host_bytes // max(self.page_bytes, 1))
        return most_weights_bytes(lora_shapes, num_pages, extra_bytes=num_pages * self.page_bytes)


ANY_ROOM = AdapterRoom(num_pages=1 << 40, page_bytes=1 << 40, host_bytes=1 << 90)


def too_many_pages(adapter_id: str, num_pages: int, num_in_pool: int, num_pinned: int = 0) -> AdapterFailed:
    pinned = f", {num_pinned} of them pinned" if num_pinned else ""
    return AdapterFailed(
        f"adapter {adapter_id!r} needs {num_pages} rank pages, the pool has {num_in_pool}{pinned}: raise adapters.gpu_bytes"
    )


def too_many_bytes(adapter_id: str, host_bytes: int) -> AdapterFailed:
    return AdapterFailed(
        f"adapter {adapter_id!r} may need more than the {host_bytes} bytes of host memory that adapters may take, "
        "less what is pinned: raise adapters.host_bytes"
    )
