"""Pins beside answers that have begun: those get to their ends, and what is pinned stays."""

import pytest

from loray.deployments.adapters import Adapter, AdapterTable
from tests.deployments.simulated_rank import greedy
from tests.deployments.stepped_scheduler import Server
from tests.deployments.traffic import output_of


@pytest.mark.parametrize("is_aborted", [False, True])
def test_pins_leave_room_for_an_answer_that_gave_way(is_aborted: bool) -> None:
    server = Server(num_blocks=400, num_pages=4, max_batch_tokens=16)
    table, pinned = server.scheduler.adapters, Adapter("pinned", "pinned", "pinned", 2)
    begun = server.add([1, 2, 3], 200, "big", num_pages=3)
    server.turn()
    assert table.could_pin(pinned), "who runs keeps its pages anyway"
    small = server.add([4], 20, "small", num_pages=2)
    while not server.scheduler.num_preemptions:
        server.turn()
    assert begun.adapter and not table.could_pin(pinned) and table.could_pin(begun.adapter)
    if is_aborted:
        server.scheduler.finish(begun)
        assert table.could_pin(pinned)
    server.run()
    assert output_of(small) == greedy("small", [4], 20) and (is_aborted or output_of(begun) == greedy("big", [1, 2, 3], 200))
    assert table.could_pin(pinned)


@pytest.mark.parametrize("num_others", [0, 3, 12])
def test_an_answer_that_lost_its_blocks_keeps_its_pages_where_a_pin_would_keep_them_from_it(num_others: int) -> None:
    server = Server(num_blocks=100, num_pages=4, max_batch_tokens=64)
    base = server.add([1, 2, 3, 4], 300)
    for _ in range(5):
        server.turn()
    prompt = list(range(120))
    begun = server.add(prompt, 150, "large", num_pages=3)
    for _ in range(60):
        server.turn()
    pinned = server.add([7], 20, "pinned", num_pages=2)
    assert pinned.adapter and server.scheduler.adapters.could_pin(pinned.adapter)
    server.scheduler.adapters.pin(pinned.adapter)
    others = [server.add([number, *range(29)], 60) for number in range(num_others)]
    server.run()
    assert server.scheduler.num_preemptions
    assert output_of(begun) == greedy("large", prompt, 150) and output_of(pinned) == greedy("pinned", [7], 20)
    assert all(sequence.is_finished for sequence in (base, *others))


def test_an_adapter_that_was_to_leave_stays_when_it_is_pinned_before_the_next_plan() -> None:
    server = Server(num_blocks=400, num_pages=3, max_batch_tokens=32)
    first = server.add(list(range(100)), 200, "a", num_pages=2)
    server.turn()
    server.add([1], 5, "b", num_pages=2)
    while first.adapter not in server.scheduler._leaving:
        server.turn()
    assert first.adapter and not first.is_finished
    server.scheduler.adapters.pin(first.adapter)
    server.scheduler.finish(first)
    assert first.adapter.page_ids


def test_a_pin_counts_no_answer_that_goes_on_already() -> None:
    server = Server(num_blocks=400, num_pages=4, max_batch_tokens=16)
    begun = server.add([1, 2, 3], 300, "big", num_pages=3)
    small = server.add([4], 20, "small", num_pages=2)
    while not small.is_finished or begun.slot is None:
        server.turn()
    assert server.scheduler.num_preemptions and not server.scheduler.adapters.returning


def test_no_adapter_may_pin_the_whole_pool() -> None:
    table = AdapterTable(4)
    assert not table.could_pin(Adapter("a", "a", "a", 4)) and table.could_pin(Adapter("a", "a", "a", 3))
