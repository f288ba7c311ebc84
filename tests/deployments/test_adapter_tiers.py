"""What is asked of adapters from outside, where reading them fails."""

import pytest

from loray.deployments.adapter_status import TierUse
from loray.deployments.adapter_tiers import AdapterTiers
from loray.deployments.adapters import Adapter, AdapterTable
from loray.deployments.errors import AdapterFailed
from loray.deployments.host_tier import HostTier

PAGE = 10


def poet(signature: str) -> Adapter:
    return Adapter("poet", "version", "folder", num_pages=1, signature=signature)


@pytest.fixture
def tiers() -> AdapterTiers:
    """They have just failed to read it."""
    tiers = AdapterTiers(AdapterTable(4), HostTier(100, PAGE))
    failing = tiers.load(poet("before"))
    tiers.failed(failing.host_copy, "a header that ends too soon", is_changed=False)
    return tiers


def test_files_that_failed_a_moment_ago_are_not_read_again(tiers: AdapterTiers) -> None:
    with pytest.raises(AdapterFailed, match="ends too soon"):
        tiers.check(poet("before"))


def test_files_that_changed_while_they_were_read_are_tried_again_by_all_who_have_found_them() -> None:
    tiers = AdapterTiers(AdapterTable(4), HostTier(100, PAGE))
    tiers.failed(tiers.load(poet("before")).host_copy, "its files changed", is_changed=True)
    tiers.check(poet("before"))


def test_equal_files_that_were_written_again_are_read(tiers: AdapterTiers) -> None:
    tiers.check(poet("after"))
    assert tiers.load(poet("after")).host_copy.signature == "after"


def test_what_was_unloaded_is_read_again_at_once(tiers: AdapterTiers) -> None:
    tiers.unload("version")
    tiers.check(poet("before"))


@pytest.mark.parametrize(("num_pages", "host_bytes"), [(4, 1000), (20, 45)], ids=["the pool", "host memory"])
def test_a_pinned_adapter_does_not_stand_in_its_own_way(num_pages: int, host_bytes: int) -> None:
    def large() -> Adapter:
        """As every request brings it."""
        return Adapter("large", "version", "folder", num_pages=3)

    tiers = AdapterTiers(AdapterTable(num_pages), HostTier(host_bytes, PAGE))
    pinned = tiers.pin(large())
    assert tiers.has_new_pins, "those who wait are looked at again"
    tiers.check(large())
    assert tiers.pin(large()) is pinned and tiers.load(large()) is pinned
    with pytest.raises(AdapterFailed, match="other"):
        tiers.check(Adapter("other", "another", "folder", num_pages=3))


def test_a_pin_leaves_host_memory_for_answers_that_are_to_go_on() -> None:
    tiers = AdapterTiers(AdapterTable(8), HostTier(70, PAGE))
    begun = tiers.table.acquire(Adapter("begun", "begun", "begun", num_pages=3))
    tiers.table.place(begun)
    tiers.table.discard(begun, is_begun=True)
    with pytest.raises(AdapterFailed, match="'pinned' cannot be pinned"):
        tiers.pin(Adapter("pinned", "pinned", "pinned", num_pages=2, extra_bytes=25))
    assert tiers.pin(begun).is_pinned, "it goes on with what it has"
    tiers.unpin("begun")
    tiers.table.place(begun)
    assert tiers.pin(Adapter("pinned", "pinned", "pinned", num_pages=2, extra_bytes=25)).is_pinned


def test_a_place_is_told_as_it_was_when_it_was_asked_for() -> None:
    tiers = AdapterTiers(AdapterTable(4), HostTier(100, PAGE))
    adapter = tiers.load(poet("files"))
    place = tiers.places(["version"])["version"]
    tiers.host.arrived(adapter.host_copy, PAGE, 0.5)
    adapter.pool_use.num_loads += 1
    assert place.is_loading and place.host_use == place.pool_use == TierUse()
    now = tiers.places(["version"])["version"]
    assert (now.host_bytes, now.host_use.num_loads, now.pool_use.num_loads) == (PAGE, 1, 1)


def test_pinned_adapters_that_are_in_the_pool_take_no_host_memory_from_others() -> None:
    """An adapter of few linears needs less of it than its pages say, which is known only while it is there."""
    tiers = AdapterTiers(AdapterTable(40), HostTier(100, PAGE))
    pinned = []
    for name in "abc":
        pinned.append(tiers.pin(Adapter(name, name, name, num_pages=5)))
        tiers.host.arrived(pinned[-1].host_copy, PAGE, 0.5)
    for adapter in pinned:
        tiers.table.place(tiers.table.acquire(adapter))
    tiers.load(Adapter("large", "large", "large", num_pages=9))  # takes the place of two of them
    assert tiers.host.num_adapters == 2
    for adapter in (*pinned, Adapter("small", "small", "small", num_pages=1)):
        tiers.check(adapter)


def test_an_adapter_in_the_pool_is_served_though_pins_would_leave_no_room_to_read_it_again() -> None:
    tiers = AdapterTiers(AdapterTable(40), HostTier(100, PAGE))
    here = tiers.load(Adapter("here", "here", "here", num_pages=5))
    tiers.host.arrived(here.host_copy, PAGE, 0.5)
    tiers.pin(Adapter("pinned", "pinned", "pinned", num_pages=9))
    with pytest.raises(AdapterFailed, match="host memory"):
        tiers.check(here)
    tiers.table.place(tiers.table.acquire(here))
    tiers.host.drop(here)
    tiers.check(here)


@pytest.mark.parametrize("why", ["pinned", "waited for"])
def test_an_adapter_that_is_kept_in_host_memory_is_served_whatever_is_pinned_later(why: str) -> None:
    """By then it takes less than its pages say."""
    tiers = AdapterTiers(AdapterTable(40), HostTier(100, PAGE))
    adapter = Adapter("here", "here", "here", num_pages=6)
    here = tiers.pin(adapter) if why == "pinned" else tiers.load(adapter)
    tiers.host.arrived(here.host_copy, 2 * PAGE, 0.5)
    if why == "waited for":
        tiers.table.acquire(here)
    tiers.pin(Adapter("later", "later", "later", num_pages=7))
    tiers.check(here)


def test_a_pinned_adapter_that_is_unloaded_leaves_its_room_to_others() -> None:
    tiers, told = AdapterTiers(AdapterTable(4), HostTier(100, PAGE)), []
    pinned = tiers.pin(Adapter("pinned", "pinned", "pinned", num_pages=3))
    tiers.host.arrived(pinned.host_copy, 3 * PAGE, 0.5)
    tiers.unload("pinned", on_freed=lambda: told.append("freed"))
    assert told == ["freed"] and not pinned.is_pinned and tiers.host.num_bytes == tiers.table.num_pinned_pages == 0
    assert tiers.pin(Adapter("other", "other", "other", num_pages=3)).is_pinned


def test_the_pages_of_what_is_unloaded_are_free_when_its_last_request_has_ended() -> None:
    tiers, told = AdapterTiers(AdapterTable(4), HostTier(100, PAGE)), []
    used = tiers.table.acquire(poet("files"))
    tiers.table.place(used)
    tiers.unload("version", on_freed=lambda: told.append("freed"))
    assert used.page_ids == [0] and not told
    tiers.table.release(used)
    tiers.free_unused(used)
    assert told == ["freed"] and not used.page_ids and tiers.table.num_used_pages == 0 and tiers.table.take_freed_pages() == [0]


def test_who_wants_an_adapter_is_told_when_its_files_are_needed_no_more() -> None:
    tiers, told = AdapterTiers(AdapterTable(4), HostTier(100, PAGE)), []
    adapter = tiers.table.acquire(poet("files"))
    tiers.want(adapter, lambda: told.append("first"))
    tiers.want(tiers.table.acquire(poet("files")), lambda: told.append("second"))
    assert not told
    tiers.arrived(adapter.host_copy, PAGE, 0.5)
    assert told == ["first", "second"]
    tiers.want(tiers.table.acquire(poet("files")), lambda: told.append("in host memory"))
    tiers.table.place(adapter)
    tiers.host.drop(adapter)
    tiers.want(tiers.table.acquire(poet("files")), lambda: told.append("in the pool"))
    assert told[2:] == ["in host memory", "in the pool"]


def test_who_was_told_that_an_adapter_is_read_is_not_told_again_when_it_is_read_once_more() -> None:
    tiers, told = AdapterTiers(AdapterTable(4), HostTier(100, PAGE)), []
    adapter = tiers.table.acquire(poet("files"))
    tiers.want(adapter, lambda: told.append("read"))
    for _ in range(2):
        tiers.arrived(adapter.host_copy, PAGE, 0.5)
        tiers.host.drop(adapter)
        tiers.host.want(adapter)
    assert told == ["read"]


def test_nothing_is_kept_of_those_who_left_before_an_adapter_was_read() -> None:
    tiers, told = AdapterTiers(AdapterTable(4), HostTier(100, PAGE)), []
    adapter = tiers.table.acquire(poet("files"))
    for _ in range(2):
        tiers.want(tiers.table.acquire(adapter), lambda: told.append("read"))
    for num_left in (2, 1, 0):
        tiers.table.release(adapter)
        tiers.free_unused(adapter)
        assert bool(tiers._unread) == bool(num_left)
    assert not told
