"""Adapters that compete for rank pages: who leaves the pool, and when. Time is counted in steps of the simulated rank."""

import random

import pytest

from loray.deployments.plan import Plan
from loray.deployments.sequence import Sequence
from loray.models.step import CapturedSteps, Pooling
from tests.deployments.simulated_rank import greedy
from tests.deployments.stepped_scheduler import BLOCK, Server
from tests.deployments.traffic import Shape, keep_waiting, new_prompt, output_of

pytestmark = pytest.mark.slow


def test_an_adapter_of_many_pages_gets_its_turn_among_a_stream_of_small_ones() -> None:
    server, rng = Server(num_blocks=400, num_pages=4, max_batch_tokens=32), random.Random(0)
    big = None
    for step in range(400):
        for adapter in ("a", "b", "c", "d", f"new{step // 10}"):
            keep_waiting(server, rng, adapter, 2, Shape(6, 10))
        if step == 50:
            big = server.add([1, 2, 3], 5, "big", num_pages=4)
        server.turn()
    assert big and big.token_ids[3:] == greedy("big", [1, 2, 3], 5)


@pytest.mark.slow
def test_adapters_that_do_not_fit_together_take_turns_under_endless_demand() -> None:
    server, rng = Server(num_blocks=400, num_pages=2, max_batch_tokens=32), random.Random(0)
    names = ["a", "b", "c", "d", "e"]
    for _ in range(3000):
        for adapter in names:
            keep_waiting(server, rng, adapter, 2, Shape(6, 10))
        server.turn()
    served = [server.served[adapter] for adapter in names]
    assert min(served) > 0.8 * max(served), server.served
    num_loads = sum(len(step.loads) for step in server.rank.steps)
    assert sum(served) > 2 * 32 * num_loads, "a turn is worth more than a step's tokens"


@pytest.mark.slow
def test_with_four_times_as_many_busy_adapters_as_the_pool_holds_none_starves() -> None:
    """Each has users who ask again as soon as they are answered, for long and short answers."""
    server, rng = Server(num_blocks=2000, num_pages=4, max_batch_tokens=64, max_running=64), random.Random(0)
    names = [f"a{i}" for i in range(16)]
    users = {(name, user): server.add(new_prompt(rng, 6), rng.randint(10, 100), name) for name in names for user in range(3)}
    waits, born = [], dict.fromkeys(users, 0)
    for step in range(4000):
        server.turn()
        for user, sequence in users.items():
            if sequence.is_finished:
                users[user], born[user] = server.add(new_prompt(rng, 6), rng.randint(10, 100), user[0]), step
            elif sequence.num_output == 1:
                waits.append(step - born[user])
    served = [server.served[name] for name in names]
    assert min(served) > 0.7 * max(served), server.served
    assert max(waits) < 900 and all(4000 - born[user] < 900 for user, sequence in users.items() if not sequence.num_output), max(waits)


def test_base_requests_are_not_held_up_by_an_adapter_that_waits_for_pages() -> None:
    server, rng = Server(num_blocks=400, num_pages=2, max_batch_tokens=32), random.Random(0)
    for name in ("a", "b"):
        server.add([1], 300, name)
    server.turn()
    starved = server.add([1], 5, "c")
    for _ in range(200):
        keep_waiting(server, rng, "", 1, Shape(6, 10))
        server.turn()
    assert starved.slot is None and server.served[""] > 1500


def test_a_pinned_adapter_does_not_leave_the_pool() -> None:
    server, rng = Server(num_blocks=400, num_pages=2, max_batch_tokens=32), random.Random(0)
    pinned = server.add([1], 2, "pinned")
    assert pinned.adapter
    server.scheduler.adapters.pin(pinned.adapter)
    for _ in range(300):
        for adapter in ("pinned", "a", "b"):
            keep_waiting(server, rng, adapter, 2, Shape(6, 10))
        server.turn()
    loads = [load.path for step in server.rank.steps for load in step.loads]
    assert loads.count("pinned") == 1 and loads.count("a") > 1 and loads.count("b") > 1


def test_an_adapter_that_is_in_the_pool_alone_stays_there_until_those_it_has_begun_are_through() -> None:
    """Its files may be others by then, and they would end in another version or not at all."""
    server = Server(num_blocks=10, num_pages=1, max_batch_tokens=8, has_cache=False)
    begun = [server.add([number] * 4, 20, "a") for number in range(3)]
    assert begun[0].adapter
    server.turn()
    begun[0].adapter.is_ready = False  # what host memory had of it has made room for others
    while not server.scheduler.num_preemptions:
        server.turn()
    late = server.add([9], 3, "b")
    server.run()
    assert [load.path for step in server.rank.steps for load in step.loads] == ["a", "b"]
    assert [output_of(sequence) for sequence in begun] == [greedy("a", [number] * 4, 20) for number in range(3)]
    assert output_of(late) == greedy("b", [9], 3)


def steps_until(server: Server, sequence: Sequence, limit: int = 2000) -> int:
    for step in range(limit):
        if sequence.is_finished:
            return step
        server.turn()
    raise AssertionError(f"not finished after {limit} steps")


@pytest.mark.slow
@pytest.mark.parametrize("num_pages", [6, 8], ids=["nearly the whole pool", "the whole pool"])
def test_one_that_needs_much_of_the_pool_waits_for_no_long_answer_and_nor_do_others(num_pages: int) -> None:
    server, rng = Server(num_blocks=4000, num_pages=8, max_batch_tokens=32, max_running=32), random.Random(0)
    names = [f"a{i}" for i in range(6)]
    long_answer = server.add([1, 2, 3], 1500, "a0")
    big = None
    for step in range(600):
        if step == 200:
            big = server.add([1], 5, "big", num_pages)
        if step == 300:
            assert big and output_of(big) == greedy("big", [1], 5)
            before = server.served.copy()
        for name in names[1:]:
            keep_waiting(server, rng, name, 1, Shape(6, 10))
        server.turn()
    assert min(server.served[name] - before[name] for name in names[1:]) > 500, "all go on"
    server.run()
    assert output_of(long_answer) == greedy("a0", [1, 2, 3], 1500)


def test_a_long_answer_of_one_that_has_most_of_the_pool_gives_way_when_it_is_ahead_and_is_right_in_the_end() -> None:
    server = Server(num_blocks=4000, num_pages=4, max_batch_tokens=32)
    long_answer = server.add([1, 2, 3], 1000, "big", num_pages=3)
    server.turn()
    small = [server.add([number], 20, name, num_pages=2) for number, name in enumerate("abc")]
    assert max(steps_until(server, sequence) for sequence in small) < 150
    server.run()
    assert [output_of(sequence) for sequence in small] == [greedy(name, [number], 20) for number, name in enumerate("abc")]
    assert output_of(long_answer) == greedy("big", [1, 2, 3], 1000)


def test_one_that_can_go_on_with_its_pages_alone_is_not_hurried() -> None:
    server = Server(num_blocks=4000, num_pages=4, max_batch_tokens=16)
    long_answer = server.add([1, 2, 3], 200, "big", num_pages=4)
    server.turn()
    assert long_answer.adapter
    long_answer.adapter.is_ready = False  # host memory has lost it, and its files may be others
    small = server.add([1], 3, "a")
    server.run()
    assert server.scheduler.num_preemptions == 0
    assert output_of(long_answer) == greedy("big", [1, 2, 3], 200) and output_of(small) == greedy("a", [1], 3)


def test_who_leaves_admits_nothing_new_but_those_that_can_go_on_with_its_pages_alone() -> None:
    server = Server(num_blocks=10, num_pages=1, max_batch_tokens=8, has_cache=False)
    begun = [server.add([number] * 4, 20, "a") for number in range(4)]
    assert begun[0].adapter
    server.turn()
    begun[0].adapter.is_ready = False
    while not server.scheduler.num_preemptions:
        server.turn()
    late, new = server.add([9], 3, "b"), server.add([8], 3, "a")
    assert steps_until(server, late) < 48, "the one that gave way goes on beside the last of the others"
    assert all(sequence.is_finished for sequence in begun) and not new.num_output
    new.adapter.is_ready = True  # type: ignore[union-attr]
    server.run()
    assert output_of(new) == greedy("a", [8], 3)


def test_what_must_go_on_with_its_adapters_pages_does_so_though_an_older_one_stands_before_it() -> None:
    server = Server(num_pages=1, max_batch_tokens=8)
    older = server.add([5, 6], 3, "a", waits_for_grammar=True)
    begun = server.add([1, 2], 40, "a")
    assert begun.adapter and begun.adapter.is_awaited and begun.adapter.num_held == 1
    server.turn()
    begun.adapter.is_ready = False  # its copy in host memory made room for others
    other = server.add([7], 3, "b")
    while begun.adapter not in server.scheduler._leaving:
        server.turn()
    server.scheduler._preempt(Plan(), begun)
    older.waits_for_grammar = False
    server.run()
    assert begun.is_finished and other.is_finished and not older.num_output and begun.adapter.num_held == 0
    begun.adapter.is_ready = True
    server.run()
    assert [output_of(one) for one in (older, begun)] == [greedy("a", [5, 6], 3), greedy("a", [1, 2], 40)]
    server.assert_empty()


@pytest.mark.parametrize("weight", [1.0, 1000.0])
def test_those_that_wait_for_pages_wait_no_longer_the_more_the_adapter_in_the_pool_weighs(weight: float) -> None:
    server, rng = Server(num_blocks=400, num_pages=1, max_batch_tokens=32, weights={"heavy": weight}), random.Random(0)
    for _ in range(50):
        keep_waiting(server, rng, "heavy", 2, Shape(6, 10))
        server.turn()
    other = server.add([7], 3, "b")
    for _ in range(60):
        keep_waiting(server, rng, "heavy", 2, Shape(6, 10))
        server.turn()
    assert other.is_finished


def test_an_adapter_of_which_all_wait_for_their_grammars_makes_room_and_comes_back() -> None:
    server = Server(num_pages=2)
    for name in "ab":
        server.add([1, 2], 3, name)
    server.run()
    held = [server.add([5, 6], 3, name, waits_for_grammar=True) for name in "ab"]
    other = server.add([7], 3, "c")
    steps_until(server, other, 10)
    assert held[0].adapter and held[0].adapter.page_ids, "one page was enough, and it has waited for longer"
    for sequence in held:
        sequence.waits_for_grammar = False
    server.run()
    assert [output_of(sequence) for sequence in held] == [greedy(name, [5, 6], 3) for name in "ab"]
    server.assert_empty()


@pytest.mark.parametrize("reason", ["pinned", "running"])
def test_an_adapter_with_requests_that_wait_for_their_grammars_stays_if_it_is(reason: str) -> None:
    server = Server(num_pages=1)
    busy = server.add([1, 2], 30 if reason == "running" else 1, "a")
    server.turn()
    held = server.add([5, 6], 3, "a", waits_for_grammar=True)
    assert held.adapter
    if reason == "pinned":
        server.scheduler.adapters.pin(held.adapter)
    other = server.add([7], 3, "b")
    for _ in range(5):
        server.turn()
    assert held.adapter.page_ids and not other.num_output and (busy.slot is None) == (reason == "pinned")


@pytest.mark.parametrize("num_blocks", [105, 120, 150, 400])
def test_two_long_answers_of_large_adapters_end_without_being_recomputed_again_and_again(num_blocks: int) -> None:
    server = Server(num_blocks=num_blocks, num_pages=4, max_batch_tokens=32)
    both = [server.add(list(range(number, number + 300)), 100, name, num_pages=3) for number, name in ((0, "a"), (900, "b"))]
    assert max(steps_until(server, sequence) for sequence in both) < 500
    assert sum(server.served.values()) < 2 * 800
    assert [output_of(s) for s in both] == [greedy(n, list(range(k, k + 300)), 100) for k, n in ((0, "a"), (900, "b"))]


@pytest.mark.parametrize("num_prompt", [96, 97, 98, 129])
def test_an_embedding_of_a_large_adapter_is_made_beside_others_that_wait(num_prompt: int) -> None:
    server, rng = Server(num_blocks=4000, num_pages=4, max_batch_tokens=32), random.Random(0)
    embedding = None
    for step in range(200):
        for name in "ab":
            keep_waiting(server, rng, name, 2, Shape(6, 10))
        if step == 20:
            embedding = server.add(list(range(num_prompt)), 1, "big", num_pages=3, pooling="mean")
        server.turn()
    assert embedding and embedding.is_finished and server.served["big"] == num_prompt


def test_nobody_gives_way_to_one_that_finds_no_blocks() -> None:
    server = Server(num_blocks=100, num_pages=1, max_batch_tokens=32)
    server.add(list(range(100)), 290)
    begun = server.add([2] * 4, 100, "a")
    for _ in range(50):
        server.turn()
    large = server.add(list(range(250)), 5, "x")
    assert steps_until(server, begun) < 60 and not large.num_output, "blocks are there when the base model's answer has ended"
    server.run()
    assert server.scheduler.num_preemptions == 0 and output_of(large) == greedy("x", list(range(250)), 5)


def test_those_that_give_way_together_go_on_in_their_order() -> None:
    server = Server(num_blocks=400, num_pages=2, max_batch_tokens=16)
    begun = [server.add([number], 80, "big", num_pages=2) for number in range(4)]
    server.turn()
    server.add([9], 30, "a")
    while not server.scheduler.num_preemptions:
        server.turn()
    assert [sequence for sequence in server.scheduler.waiting if sequence in begun][:1] == begun[:1]
    server.run()
    assert [output_of(sequence) for sequence in begun] == [greedy("big", [number], 80) for number in range(4)]


def test_an_adapter_that_waits_for_a_grammar_stays_where_its_pages_would_not_be_enough() -> None:
    server = Server(num_blocks=400, num_pages=4, max_batch_tokens=8)
    server.add([1], 1, "held")
    server.run()
    running = [server.add([1, 2], 100, "a", num_pages=2), server.add([1, 2], 100, "b")]
    for _ in range(5):
        server.turn()
    held = server.add([5, 6], 3, "held", waits_for_grammar=True)
    server.add([7], 3, "large", num_pages=4)
    server.turn()
    assert held.adapter and held.adapter.page_ids and all(sequence.slot is not None for sequence in running)
    held.waits_for_grammar = False
    assert steps_until(server, held) < 10


@pytest.mark.parametrize("seed", range(12))
def test_random_traffic_of_large_and_small_adapters_ends_and_leaves_nothing_behind(seed: int) -> None:
    rng = random.Random(seed)
    num_pages = rng.randint(1, 6)
    server = Server(
        num_blocks=rng.choice([40, 80, 200]),
        num_pages=num_pages,
        max_batch_tokens=rng.choice([8, 16, 32]),
        max_running=rng.choice([2, 8]),
        has_cache=rng.random() < 0.5,
        captured=CapturedSteps(max_tokens=12, max_scores=200) if seed % 2 else None,
    )
    pages = {name: rng.randint(1, num_pages) for name in "abcdef"}
    asked: list[tuple[Sequence, str, list[int]]] = []
    for _ in range(60):
        name, prompt = rng.choice(["", *pages]), new_prompt(rng, rng.choice([3, 20, 65, 97]))
        pooling: Pooling = "mean" if rng.random() < 0.2 else ""
        num_new, has_grammar = (1, False) if pooling else (rng.choice([2, 40]), rng.random() < 0.2)
        sequence = server.add(prompt, num_new, name, pages.get(name, 1), pooling, has_grammar)
        asked.append((sequence, name, prompt))
        for _ in range(rng.randint(0, 6)):
            server.turn()
        for waiting in asked:
            waiting[0].waits_for_grammar &= rng.random() < 0.9
    for sequence, _, _ in asked:
        sequence.waits_for_grammar = False
    server.run()
    assert all(s in server.embeddings or output_of(s) == greedy(name, prompt, s.request.max_new_tokens) for s, name, prompt in asked)
    server.assert_empty()


def test_a_start_costs_what_is_not_in_the_cache_and_every_token_pays_for_one() -> None:
    server = Server()
    first = server.add(list(range(12)), 4)
    server.plan()
    assert first.num_owed == 12 - 1
    server.run()
    second = server.add(list(range(12)), 4)
    server.plan()
    server.plan()
    assert second.num_owed == 12 - 2 * BLOCK - 2, "its last block is computed anew, to sample from"


def test_an_adapter_that_waits_for_a_grammar_stays_where_a_pin_would_keep_it_from_coming_back() -> None:
    server = Server(num_pages=3)
    server.add([1], 1, "held", num_pages=2)
    server.run()
    held = server.add([5, 6], 3, "held", num_pages=2, waits_for_grammar=True)
    pinned = server.add([7], 3, "pinned", num_pages=2)
    assert held.adapter and pinned.adapter
    server.scheduler.adapters.pin(pinned.adapter)
    server.turn()
    assert held.adapter.page_ids and not pinned.adapter.page_ids
    held.waits_for_grammar = False
    server.run()
    assert output_of(held) == greedy("held", [5, 6], 3) and output_of(pinned) == greedy("pinned", [7], 3)


def test_an_adapter_that_comes_while_the_base_model_runs_alone_starts_no_later_than_those_that_wait() -> None:
    server, number = Server(num_blocks=4000, num_pages=1, max_batch_tokens=64, max_running=64), 0
    asked: dict[str, list[Sequence]] = {"": [], "b": [], "c": []}
    waits, cold, since = [], None, 0
    for turn in range(1500):
        for name, sequences in asked.items():
            sequences[:] = [sequence for sequence in sequences if not sequence.is_finished]
            while len(sequences) < 8:
                number += 1
                sequences.append(server.add([number], 10 + number % 40 if name else 20 + number % 40, name))
        if cold is None and turn % 50 == 49:
            number += 1
            cold, since = server.add([number], 5, "cold"), turn
        server.turn()
        if cold and cold.is_finished:
            waits.append(turn - since)
            cold = None
    assert len(waits) > 5 and max(waits) < 200, waits


@pytest.mark.parametrize("num_before", [100, 1000])
def test_who_took_what_nobody_wanted_is_not_kept_out_for_it_when_one_more_comes(num_before: int) -> None:
    """There are pages for three, and slots for all: a takes most of them, until d comes."""
    server, rng = Server(num_blocks=40_000, num_pages=3, max_batch_tokens=64, max_running=32), random.Random(0)
    longest_gap = gap = 0
    for step in range(num_before + 1000):
        for name, num_clients in {"a": 8, "b": 2, "c": 2, "d": 2 if step > num_before else 0}.items():
            running = sum(sequence.adapter is not None and sequence.adapter.adapter_id == name for sequence in server.scheduler.running)
            for _ in range(num_clients - running - server.scheduler.waiting.num_waiting_of(name)):
                server.add([step] * rng.randint(1, 5), rng.randint(1, 60), name)
        server.turn()
        is_served = any(sequence.adapter and sequence.adapter.adapter_id == "a" for sequence in server.scheduler.running)
        gap = 0 if is_served else gap + 1
        longest_gap = max(longest_gap, gap)
    assert longest_gap < 250


@pytest.mark.parametrize("num_clients", [1, 3])
def test_one_that_needs_the_whole_pool_is_served_as_much_as_those_that_do_not(num_clients: int) -> None:
    """All of an adapter's answers end together, so it has no requests for a moment, which does not cost it its turn."""
    server = Server(num_blocks=4000, num_pages=4, max_batch_tokens=64, max_running=16)
    asked = [(name, num_pages, None) for name, num_pages in (("a", 2), ("b", 2), ("large", 4)) for _ in range(num_clients)]
    for _ in range(4000):
        asked = [
            (name, num_pages, server.add([server.arrivals] * 5, 10, name, num_pages) if not sequence or sequence.is_finished else sequence)
            for name, num_pages, sequence in asked
        ]
        server.turn()
    assert max(server.served.values()) < 1.05 * min(server.served.values()), server.served


def test_one_that_is_to_leave_and_is_started_meanwhile_keeps_its_pages() -> None:
    """It can go on with them alone, so it starts though one that was served less waits for them, and before one that was served more."""
    server = Server(num_blocks=400, num_pages=1, max_batch_tokens=8, max_running=4)
    begun = server.add([1], 30, "begun")
    for _ in range(5):
        server.turn()
    server.scheduler._preempt(Plan(), begun)
    while server.complete():
        pass
    assert begun.adapter
    begun.adapter.is_ready = False
    before, after = server.add([2], 3, "before"), server.add([3], 3, "after")
    server.scheduler.waiting.charge(begun, 100)
    server.scheduler.waiting.charge(after, 200)
    server.run()
    assert output_of(begun) == greedy("begun", [1], 30)
    assert [output_of(before), output_of(after)] == [greedy("before", [2], 3), greedy("after", [3], 3)]
