"""What there is room for, and the largest file that could hold such an adapter."""

import pytest

from loray.deployments.adapter_room import AdapterRoom
from loray.deployments.errors import AdapterFailed

SHAPES = {"model.layers.0.q_proj": (64, 64), "model.embed_tokens": (100, 64)}


def test_a_file_may_hold_all_ranks_and_all_that_comes_beside_them() -> None:
    few, many = (AdapterRoom(num_pages=2, page_bytes=size, host_bytes=1 << 40).max_weights_bytes(SHAPES) for size in (1000, 3000))
    assert many - few == 2 * (3000 - 1000), "what is beside the pages takes as much as they do"
    more_ranks = AdapterRoom(num_pages=3, page_bytes=1000, host_bytes=1 << 40).max_weights_bytes(SHAPES)
    assert more_ranks - few == 8 * (64 + 64) * 4 + 1000


def test_host_memory_bounds_it_too() -> None:
    room = AdapterRoom(num_pages=1000, page_bytes=1000, host_bytes=2000)
    assert room.max_weights_bytes(SHAPES) == AdapterRoom(num_pages=2, page_bytes=1000, host_bytes=1 << 40).max_weights_bytes(SHAPES)


def test_host_memory_has_to_hold_the_pages_and_what_is_beside_them() -> None:
    assert AdapterRoom(num_pages=10, page_bytes=10, host_bytes=40).pages_for("a", rank=8, extra_bytes=20) == 2
    with pytest.raises(AdapterFailed, match="'a' may need more than the 39 bytes of host memory"):
        AdapterRoom(num_pages=10, page_bytes=10, host_bytes=39).pages_for("a", rank=8, extra_bytes=20)
