"""Who may wait at an engine, and who is told to come again."""

import pytest

from loray.deployments.adapter_tiers import AdapterTiers
from loray.deployments.adapters import Adapter
from loray.deployments.errors import Overloaded
from loray.deployments.host_tier import HostTier
from loray.deployments.queue_limits import QueueLimits, check_admission
from loray.deployments.request import GenerationRequest
from loray.deployments.sequence import Sequence
from loray.models.step import Sampling
from tests.deployments.stepped_scheduler import NOBODY, Server


def waiting(server: Server, adapter: str = "") -> Sequence:
    """One that is not there yet."""
    request = GenerationRequest(request_id="late", prompt_ids=[1], max_new_tokens=1, sampling=Sampling())
    return Sequence(request, Adapter(adapter, adapter, adapter, 1) if adapter else None, NOBODY, 99)


def check(server: Server, adapter: str, limits: QueueLimits) -> None:
    check_admission(waiting(server, adapter), server.scheduler, AdapterTiers(server.scheduler.adapters, HostTier(1 << 20, 8)), limits)


@pytest.mark.parametrize("name", ["a", ""])
def test_no_more_of_one_adapter_wait_than_may_and_others_are_let_in(name: str) -> None:
    server, limits = Server(), QueueLimits(max_waiting=100, max_waiting_of_adapter=2)
    server.add([1], 1, name)
    check(server, name, limits)
    server.add([2], 1, name)
    with pytest.raises(Overloaded, match=f"2 requests of {name or 'the base model'} are waiting already; try again"):
        check(server, name, limits)
    check(server, "other", limits)


def test_those_that_wait_for_their_grammars_count_too() -> None:
    server, limits = Server(), QueueLimits(max_waiting=2, max_waiting_of_adapter=3)
    held = [server.add([number], 1, "a", waits_for_grammar=True) for number in range(3)]
    with pytest.raises(Overloaded, match="3 requests are waiting already"):
        check(server, "a", limits)
    with pytest.raises(Overloaded, match="3 requests of a are waiting already"):
        check(server, "a", QueueLimits(max_waiting=100, max_waiting_of_adapter=3))
    check(server, "b", limits)
    held[0].waits_for_grammar = False
    server.scheduler.waiting.wake_loaded()
    assert server.scheduler.waiting.num_waiting_of("a") == 3
    for sequence in held:
        server.scheduler.finish(sequence)
    assert server.scheduler.waiting.num_waiting_of("a") == len(server.scheduler.waiting) == 0


def test_a_full_queue_has_room_for_those_who_do_not_fill_it() -> None:
    server, limits = Server(), QueueLimits(max_waiting=2, max_waiting_of_adapter=100)
    for number in range(2):
        server.add([number], 1, "a")
    with pytest.raises(Overloaded, match="2 requests are waiting already"):
        check(server, "a", limits)
    check(server, "b", limits)


def test_those_who_do_not_fill_the_queue_find_it_full_at_twice_its_length() -> None:
    server, limits = Server(), QueueLimits(max_waiting=2, max_waiting_of_adapter=100)
    for number in range(3):
        server.add([number], 1, "a")
    check(server, "b", limits)
    server.add([3], 1, "a")
    with pytest.raises(Overloaded, match="4 requests are waiting already"):
        check(server, "b", limits)
