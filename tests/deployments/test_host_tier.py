import pytest

from loray.deployments.adapter_status import TierUse
from loray.deployments.adapters import Adapter
from loray.deployments.host_tier import HostTier
from loray.models.step import HostCopy

PAGE = 10


def adapter(name: str, num_pages: int = 1, references: int = 0) -> Adapter:
    return Adapter(name, name, name, num_pages, references=references)


def names(copies: list[HostCopy]) -> list[str]:
    return [copy.path for copy in copies]


def hold(tier: HostTier, *adapters: Adapter) -> None:
    for one in adapters:
        tier.want(one)
        tier.arrived(one.host_copy, one.num_pages * PAGE, 0.5)
    tier.take_orders()


def test_a_wanted_adapter_is_prepared_once_and_ready_when_it_has_arrived() -> None:
    tier, a = HostTier(30, PAGE), adapter("a", 2)
    tier.want(a)
    tier.want(a)
    assert not a.is_ready and tier.is_loading(a) and tier.num_bytes == 20
    prepares, drops = tier.take_orders()
    assert names(prepares) == ["a"] and not drops
    assert tier.arrived(a.host_copy, 15, 0.5) is a
    assert a.is_ready and tier.num_bytes == tier.bytes_of(a) == 15
    assert a.host_use == TierUse(num_loads=1, load_seconds=0.5)
    tier.want(a)
    assert tier.take_orders() == ([], [])


def test_what_an_adapter_has_beside_its_pages_counts() -> None:
    tier, large = HostTier(30, PAGE), Adapter("large", "large", "large", 1, extra_bytes=25)
    assert not tier.could_hold(large, [])
    tier.want(Adapter("fits", "fits", "fits", 1, extra_bytes=20))
    assert tier.num_bytes == 30


def test_room_is_made_of_the_least_recently_wanted() -> None:
    tier, a, b, c = HostTier(20, PAGE), adapter("a"), adapter("b"), adapter("c")
    hold(tier, a, b)
    tier.want(a)
    tier.want(c)
    prepares, drops = tier.take_orders()
    assert (names(prepares), names(drops), tier.num_evictions) == (["c"], ["b"], 1)
    assert a.is_ready and not b.is_ready and tier.num_bytes == 20
    assert (a.host_use.num_evictions, b.host_use.num_evictions) == (0, 1)


@pytest.mark.parametrize("why", ["waited for", "pinned", "being read"])
def test_what_is_needed_stays_and_the_new_one_waits_for_room(why: str) -> None:
    tier, kept, new = HostTier(10, PAGE), adapter("kept"), adapter("new")
    if why == "being read":
        tier.want(kept)
    else:
        hold(tier, kept)
    kept.references, kept.is_pinned = int(why == "waited for"), why == "pinned"
    tier.take_orders()
    tier.want(new)
    assert tier.take_orders() == ([], []) and not new.is_ready
    if why == "being read":
        tier.arrived(kept.host_copy, PAGE, 0.5)
    kept.references, kept.is_pinned = 0, False
    tier.want(new)
    assert [names(orders) for orders in tier.take_orders()] == [["new"], ["kept"]]


def test_those_that_wait_for_their_grammars_alone_keep_no_room() -> None:
    tier, held, new = HostTier(10, PAGE), adapter("held", references=2), adapter("new", references=1)
    held.num_held = 2
    hold(tier, held)
    tier.want(new)
    assert [names(orders) for orders in tier.take_orders()] == [["new"], ["held"]]
    tier.want(held)  # finds none
    tier.arrived(new.host_copy, PAGE, 0.5)
    new.references = 0
    later = adapter("later", references=1)
    tier.want(later)
    assert [names(orders) for orders in tier.take_orders()] == [["later"], ["new"]]
    held.num_held = 1
    later.references = 0
    tier.arrived(later.host_copy, PAGE, 0.5)
    tier.want(held)
    assert [names(orders) for orders in tier.take_orders()] == [["held"], ["later"]]


def test_nothing_leaves_for_one_that_would_find_no_room_all_the_same() -> None:
    tier, needed, unused, large = HostTier(30, PAGE), adapter("needed", references=1), adapter("unused"), adapter("large", 3, references=1)
    hold(tier, needed, unused)
    tier.want(large)
    assert tier.take_orders() == ([], []) and unused.is_ready and tier.num_evictions == 0


def test_an_adapter_that_is_in_the_pool_may_leave_host_memory_though_it_is_used() -> None:
    tier, used, new = HostTier(10, PAGE), adapter("used", references=1), adapter("new")
    hold(tier, used)
    used.page_ids = [3]
    tier.want(new)
    assert [names(orders) for orders in tier.take_orders()] == [["new"], ["used"]]
    tier.want(used)
    assert tier.take_orders() == ([], []), "it is in the pool: nothing is to be read"


def test_one_that_is_dropped_and_wanted_again_is_read_after_it_was_dropped() -> None:
    tier, a, b = HostTier(10, PAGE), adapter("a"), adapter("b")
    hold(tier, a)
    tier.drop(a)
    tier.want(a)
    assert [names(orders) for orders in tier.take_orders()] == [[], ["a"]]
    assert [names(orders) for orders in tier.take_orders()] == [["a"], []]
    tier.want(b)
    assert tier.take_orders() == ([], [])


def test_one_that_is_dropped_while_it_is_read_goes_when_it_has_arrived() -> None:
    tier, a = HostTier(10, PAGE), adapter("a")
    tier.want(a)
    tier.take_orders()
    tier.drop(a)
    assert tier.take_orders() == ([], []) and tier.num_bytes == 10
    tier.arrived(a.host_copy, 8, 0.5)
    assert names(tier.take_orders()[1]) == ["a"] and not a.is_ready and tier.num_bytes == tier.num_adapters == 0


def test_one_that_is_dropped_while_it_is_read_and_wanted_again_stays() -> None:
    tier, a = HostTier(10, PAGE), adapter("a")
    tier.want(a)
    tier.take_orders()
    tier.drop(a)
    tier.want(a)
    assert tier.take_orders() == ([], []), "it is on its way already"
    tier.arrived(a.host_copy, 8, 0.5)
    assert tier.take_orders() == ([], []) and a.is_ready and tier.bytes_of(a) == tier.num_bytes == 8


def test_a_failed_one_leaves_nothing_and_can_be_tried_again() -> None:
    tier, a = HostTier(10, PAGE), adapter("a")
    tier.want(a)
    tier.take_orders()
    assert tier.failed(a.host_copy, "torn") is a and a.error == "torn"
    assert names(tier.take_orders()[1]) == ["a"] and tier.num_bytes == 0
    tier.want(a)
    assert names(tier.take_orders()[0]) == ["a"]


def test_what_could_never_be_held_beside_the_pinned_is_known() -> None:
    assert HostTier(30, PAGE).could_hold(adapter("a", 3), []) and not HostTier(29, PAGE).could_hold(adapter("a", 3), [])
    tier, pinned = HostTier(40, PAGE), adapter("pinned", 2)
    assert tier.could_hold(adapter("a", 2), [pinned]) and not tier.could_hold(adapter("a", 3), [pinned])
    assert tier.could_pin(adapter("a", 1), [pinned], []) and not tier.could_pin(adapter("a", 2), [pinned], []), "nothing would be left"
    hold(tier, pinned)
    tier.drop(pinned)
    tier.want(pinned)
    tier.take_orders()
    tier.arrived(pinned.host_copy, 5, 0.5)
    assert tier.could_hold(adapter("a", 3), [pinned]), "it takes less than it might have"


def test_a_large_one_is_not_passed_by_small_ones_for_ever() -> None:
    tier = HostTier(30, PAGE)
    small = [adapter(str(i), references=1) for i in range(3)]
    hold(tier, *small)
    large = adapter("large", 3, references=1)
    tier.want(large)
    for one in small:
        one.page_ids = [1]
        late = adapter(f"late{one.version}", references=1)
        tier.want(late)
        assert not tier.is_loading(late), "room that comes free is kept for the large one"
    tier.want(large)
    assert names(tier.take_orders()[0]) == ["large"]


@pytest.mark.parametrize("why", ["nobody waits for it any more", "it is in the pool"])
def test_one_that_found_no_room_keeps_it_from_nobody_once_it_needs_none(why: str) -> None:
    tier, kept, large = HostTier(30, PAGE), adapter("kept", references=1), adapter("large", 3, references=1)
    hold(tier, kept)
    tier.want(large)
    if why == "it is in the pool":
        large.page_ids = [1, 2, 3]
    else:
        large.references = 0
    small = adapter("small", references=1)
    tier.want(small)
    assert tier.is_loading(small)


def test_what_has_left_is_known_to_be_nowhere_and_says_nothing_of_its_last_failure_when_it_comes_again() -> None:
    tier, a = HostTier(10, PAGE), adapter("a")
    hold(tier, a)
    assert a.is_in_host
    tier.drop(a)
    assert not a.is_in_host
    tier.want(a)
    tier.failed(a.host_copy, "torn")
    assert a.error == "torn" and not a.is_in_host
    tier.want(a)
    assert a.error == "" and a.is_in_host


def test_one_that_has_found_room_at_last_keeps_it_from_nobody_while_it_is_read() -> None:
    tier, kept, large, small = HostTier(40, PAGE), adapter("kept", 2, references=1), adapter("large", 3, references=1), adapter("small")
    hold(tier, kept)
    tier.want(large)
    assert not tier.is_loading(large)
    kept.references = 0
    tier.want(large)
    tier.want(small)
    assert tier.is_loading(large) and tier.is_loading(small)


def test_what_is_to_go_on_stands_neither_in_the_way_of_its_own_pin_nor_counts_twice_when_it_is_pinned() -> None:
    begun = adapter("begun", 3)
    assert HostTier(50, PAGE).could_pin(begun, [], [begun]) and not HostTier(50, PAGE).could_pin(adapter("a", 3), [], [begun])
    begun.is_pinned = True
    assert HostTier(60, PAGE).could_pin(adapter("a", 2), [begun], [begun])


def test_what_running_answers_have_goes_after_what_nobody_uses() -> None:
    """They may need it once more, if they give way to others."""
    tier, used, unused = HostTier(20, PAGE), adapter("used", references=1), adapter("unused")
    hold(tier, used, unused)
    used.page_ids = [0]
    for name, left in (("new", ["unused"]), ("newer", ["used"])):
        tier.want(adapter(name))
        assert names(tier.take_orders()[1]) == left
