"""Adapters that compete for slots, tokens, blocks and pages. Time is counted in steps of the simulated rank."""

import itertools
import random

import pytest

from loray.deployments.fair_clock import MAX_HEAD_START
from loray.deployments.sequence import Sequence
from tests.deployments.simulated_rank import greedy
from tests.deployments.stepped_scheduler import Server
from tests.deployments.traffic import Shape, keep_waiting, new_prompt, output_of

pytestmark = pytest.mark.slow

NINE = [f"a{i}" for i in range(9)]
FLOOD = "flood"
MAX_FLOOD_WAITING = 256


def p99_steps_to_first_token(flood: Shape | None, num_steps: int = 1500) -> int:
    """Of nine adapters that send a request each in 50 steps; with a flood, a tenth sends a hundred times as many."""
    rng, flood_rng = random.Random(0), random.Random(1)
    server = Server(num_blocks=160, num_pages=10, max_batch_tokens=48, max_running=16)
    waiting: dict[Sequence, int] = {}
    delays: list[int] = []
    for step in range(num_steps):
        for adapter in NINE:
            if rng.random() < 1 / 50:
                waiting[server.add(new_prompt(rng, rng.randint(4, 24)), rng.randint(4, 16), adapter)] = step
        if flood and server.scheduler.waiting.num_waiting_of(FLOOD) < MAX_FLOOD_WAITING:
            for _ in range(2):
                server.add(new_prompt(flood_rng, flood.num_prompt), flood.num_output, FLOOD)
        server.turn()
        for sequence in [sequence for sequence in waiting if sequence.num_output]:
            delays.append(step - waiting.pop(sequence) + 1)
    assert len(delays) > 200
    return sorted(delays)[int(len(delays) * 0.99)]


@pytest.mark.parametrize(
    "flood",
    [Shape(8, 200), Shape(200, 4), Shape(60, 60), Shape(4, 4)],
    ids=["that holds the slots", "of long prompts", "that holds the blocks", "of small requests"],
)
def test_a_flood_by_one_adapter_at_most_doubles_the_others_time_to_the_first_token(flood: Shape) -> None:
    assert p99_steps_to_first_token(flood) <= 2 * p99_steps_to_first_token(None)


@pytest.mark.parametrize("flood", [Shape(8, 200), Shape(200, 4), Shape(60, 60), Shape(500, 1)], ids=str)
def test_a_prompt_of_several_steps_takes_hardly_more_of_them_beside_a_flood(flood: Shape) -> None:
    """Of an adapter that asks now and then: it takes turns with the flood no more than decodes and the step that runs make it."""
    rng, server = random.Random(0), Server(num_blocks=2000, max_batch_tokens=48, max_running=8)
    delays: list[int] = []
    for step in range(3000):
        keep_waiting(server, rng, FLOOD, 8, flood)
        if step % 100 == 99:
            calm, came = server.add(new_prompt(rng, 288), 4, "calm"), step
        server.turn()
        if step >= 99 and calm.num_output and len(delays) < (came + 1) // 100:
            delays.append(step - came + 1)
    num_decodes = 7  # of the flood, at most, in each step
    alone, most = 288 / 48 + 2, 288 / (48 - num_decodes) + 4
    assert max(delays) <= most < 2 * alone, delays


@pytest.mark.parametrize("num_small", [4, 8, 11])
def test_a_request_for_most_of_the_blocks_is_not_passed_for_ever_by_small_ones(num_small: int) -> None:
    """They come one after another, each of another adapter than the last, and there is always room for one more of them."""
    rng, server = random.Random(0), Server(num_blocks=64, num_pages=12, max_batch_tokens=32, max_running=16)
    for step in range(160):
        for i in range(num_small):
            keep_waiting(server, rng, f"small{i}", 1, Shape(12, 20))
        if step == 100:
            large = server.add(new_prompt(rng, 180), 4, "large")  # 45 blocks
        server.turn()
    assert large.num_output, "it never began"


def test_an_adapter_that_always_asks_is_served_although_ever_new_ones_come() -> None:
    """More of them than can be served: each has one request. It gets half of its share at least."""
    rng, server = random.Random(0), Server(num_blocks=2000, num_pages=400, max_batch_tokens=48, max_running=16)
    served: list[float] = []
    for step in range(900):
        keep_waiting(server, rng, "busy", 4, Shape(40, 4))
        while len(server.scheduler.waiting) < 20:
            server.add(new_prompt(rng, 60), 2, f"new{server.arrivals}")
        server.turn()
        if step % 100 == 99:
            served.append(server.served["busy"])
    assert all(after > before for before, after in itertools.pairwise(served)), served
    assert served[-1] > 900 * 48 / 20 / 2, "at least half of a twentieth"


def test_equal_demand_is_served_equally_whatever_its_shape() -> None:
    shapes = {"a": Shape(40, 4), "b": Shape(4, 40), "c": Shape(20, 20), "": Shape(10, 10)}
    server, rng = Server(num_blocks=400, max_batch_tokens=48, max_running=16), random.Random(0)
    for step in range(1200):
        for adapter, shape in shapes.items():
            keep_waiting(server, rng, adapter, 4, shape)
        server.turn()
        if step >= 400:
            served = [server.served[adapter] for adapter in shapes]
            assert max(served) < 1.05 * min(served), f"after {step} steps: {server.served}"


def test_equal_demand_is_served_equally_while_blocks_are_short() -> None:
    server, rng = Server(num_blocks=60, max_batch_tokens=48, max_running=16), random.Random(0)
    for _ in range(1500):
        for adapter in "abcd":
            keep_waiting(server, rng, adapter, 4, Shape(rng.randint(4, 20), rng.randint(10, 30)))
        server.turn()
    served = [server.served[adapter] for adapter in "abcd"]
    assert server.scheduler.num_preemptions > 0
    assert max(served) < 1.05 * min(served), server.served


def test_an_adapter_of_twice_the_weight_is_served_twice_as_much() -> None:
    server, rng = Server(num_blocks=400, max_batch_tokens=32, weights={"a": 2.0, "": 0.5}), random.Random(0)
    for _ in range(1000):
        for adapter in ("a", "b", ""):
            keep_waiting(server, rng, adapter, 4, Shape(12, 12))
        server.turn()
    assert server.served["a"] == pytest.approx(2 * server.served["b"], rel=0.05)
    assert server.served["b"] == pytest.approx(2 * server.served[""], rel=0.05)


def test_idle_time_earns_no_credit() -> None:
    server, rng = Server(num_blocks=400, max_batch_tokens=32), random.Random(0)
    for _ in range(500):
        keep_waiting(server, rng, "busy", 4, Shape(12, 12))
        server.turn()
    before = server.served["busy"]
    for _ in range(500):
        keep_waiting(server, rng, "busy", 4, Shape(12, 12))
        keep_waiting(server, rng, "back", 4, Shape(12, 12))
        server.turn()
    assert server.served["busy"] - before == pytest.approx(server.served["back"], rel=0.05)


def test_time_spent_loading_earns_no_credit_and_holds_up_nobody() -> None:
    server, rng = Server(num_blocks=400, max_batch_tokens=32), random.Random(0)
    slow = server.add([1] * 12, 12, "slow")
    assert slow.adapter
    slow.adapter.is_ready = False
    for _ in range(500):
        keep_waiting(server, rng, "busy", 4, Shape(12, 12))
        server.turn()
    before = server.served["busy"]
    assert before > 5000 and slow.slot is None
    slow.adapter.is_ready = True
    for _ in range(500):
        keep_waiting(server, rng, "busy", 4, Shape(12, 12))
        keep_waiting(server, rng, "slow", 4, Shape(12, 12))
        server.turn()
    assert server.served["busy"] - before == pytest.approx(server.served["slow"], rel=0.05)


def test_places_are_taken_over_rarely_enough_to_pay_for_it() -> None:
    server, rng = Server(num_blocks=400, max_batch_tokens=48, max_running=16, has_cache=False), random.Random(0)
    for _ in range(1000):
        for adapter in ("a", "b", "c"):
            keep_waiting(server, rng, adapter, 4, Shape(rng.randint(4, 20), rng.randint(4, 60)))
        server.turn()
    assert server.scheduler.num_preemptions < server.arrivals / 20


def test_a_step_in_which_an_adapter_gives_way_loads_another_and_the_next_admits_it() -> None:
    server = Server(num_blocks=5)
    server.add([1] * 4, 16, adapter="a")
    young = server.add([2] * 8, 12, adapter="a")
    for _ in range(6):
        assert server.plan()
    late = server.add([3], 2, adapter="b")
    server.plan()
    assert young.slot is None and late.adapter is not None and late.adapter.page_ids
    server.plan()
    assert young.slot is None and late.slot is not None
    server.run()
    assert output_of(young) == greedy("a", [2] * 8, 12) and output_of(late) == greedy("b", [3], 2)


def test_prompts_in_progress_and_waiting_ones_share_the_budget_by_what_their_adapters_were_served() -> None:
    server = Server(num_blocks=400, max_batch_tokens=8)
    long = server.add(list(range(1200)), 1, adapter="long")
    for _ in range(2 * MAX_HEAD_START // 8):
        server.turn()
    short = server.add([1, 2, 3], 1, adapter="short")
    for _ in range(4):
        server.turn()
    assert short.is_finished and not long.is_finished
    server.run()
    assert output_of(long) == greedy("long", list(range(1200)), 1)


def test_a_waiting_prompt_leaves_the_blocks_that_a_prompt_in_progress_still_needs() -> None:
    server = Server(num_blocks=12, max_batch_tokens=8)
    server.add([1] * 40, 1, adapter="a")
    server.turn()
    server.add([2] * 16, 1, adapter="b")
    server.run()
    assert server.scheduler.num_preemptions == 0
    server.assert_empty()


def test_the_adapter_that_holds_most_blocks_gives_way_when_they_run_out() -> None:
    server = Server(num_blocks=16)
    server.add([0], 2, adapter="b")
    flood = [server.add([i] * 8, 24, adapter="a") for i in range(1, 4)]
    small = server.add([9] * 2, 12, adapter="b")
    while not small.is_finished:
        server.turn()
        assert small.slot is not None or small.is_finished, "the youngest of all, but not of the adapter that holds most"
    assert server.scheduler.num_preemptions > 0
    server.run()
    assert [output_of(sequence) for sequence in flood] == [greedy("a", [i] * 8, 24) for i in range(1, 4)]


def test_a_large_prompt_that_finds_no_blocks_is_not_passed_by_small_ones_forever() -> None:
    server, rng = Server(num_blocks=40, max_batch_tokens=48), random.Random(0)
    large = None
    for step in range(300):
        for adapter in "abc":
            keep_waiting(server, rng, adapter, 2, Shape(8, 12))
        if step == 20:
            large = server.add([1] * 120, 2, "large")
        server.turn()
    assert large and output_of(large) == greedy("large", [1] * 120, 2)


def test_what_is_charged_is_what_the_ranks_compute_also_when_rows_are_dropped_for_want_of_blocks() -> None:
    server = Server(num_blocks=16)
    first = server.add([0] * 4, 60, "a")
    begun = server.scheduler.waiting.served(first)
    for i in range(1, 4):
        server.add([i] * 4, 20, "a")
    server.turn()
    for i in range(3):
        server.add([i] * 2, 12, "b")
    while not first.is_finished:
        on_their_way = sum(row.num_tokens for plan, _ in server.in_flight for s, row in plan.rows.items() if s.request.adapter_id == "a")
        assert server.scheduler.waiting.served(first) == begun + server.served["a"] + on_their_way
        server.turn()
    assert server.scheduler.num_preemptions > 0


def test_only_computed_tokens_are_charged() -> None:
    server = Server()
    server.add([5] * 20, 1, "a")
    server.run()
    running = server.add([7], 30, "a")
    server.plan()
    before = server.scheduler.waiting.served(running)
    server.add([5] * 20, 2, "a")
    server.plan()
    assert server.scheduler.num_cached_tokens == 16
    assert server.scheduler.waiting.served(running) - before == 1 + 4, "one decode, and of the prompt what was not cached"


def test_a_request_whose_adapter_is_not_ready_takes_no_slot_and_holds_up_nobody() -> None:
    server = Server(max_running=1)
    slow = server.add([1], 5, adapter="slow")
    assert slow.adapter
    slow.adapter.is_ready = False
    other = server.add([2], 5, adapter="other")
    while not other.is_finished:
        assert server.turn()
    assert slow.slot is None and server.scheduler.waiting.next_adapters(8) == [slow.adapter]
    assert not server.turn(), "nothing can run"
    slow.adapter.is_ready = True
    server.run()
    assert output_of(slow) == greedy("slow", [1], 5)
