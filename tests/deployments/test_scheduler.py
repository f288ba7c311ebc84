import random
from collections import deque

import msgspec
import pytest

from loray.cluster.channel import Address
from loray.deployments.adapters import Adapter, AdapterTable
from loray.deployments.block_pool import BlockPool
from loray.deployments.request import GenerationRequest
from loray.deployments.scheduler import Plan, Scheduler
from loray.deployments.sequence import Sequence
from loray.models.step import Sampling, Step
from tests.deployments.simulated_rank import SimulatedRank, greedy

BLOCK = 4
NOBODY = Address("", b"")


class Server:
    """A scheduler and a simulated rank, one step ahead, as the engine runs them."""

    def __init__(self, num_blocks: int = 64, num_pages: int = 8, max_batch_tokens: int = 32, max_running: int = 8, eos: int = -1) -> None:
        self.scheduler = Scheduler(BlockPool(num_blocks, BLOCK), AdapterTable(num_pages), max_batch_tokens, max_running)
        self.rank = SimulatedRank(num_blocks, BLOCK, num_pages)
        self.in_flight: deque[tuple[Plan, Step]] = deque()
        self.eos_ids = {eos}
        self.arrivals = 0

    def add(self, prompt: list[int], max_new_tokens: int, adapter: str = "", num_pages: int = 1) -> Sequence:
        request = GenerationRequest(
            request_id=str(self.arrivals), prompt_ids=prompt, max_new_tokens=max_new_tokens, sampling=Sampling(), adapter_id=adapter
        )
        version = Adapter(adapter, adapter, adapter, num_pages) if adapter else None
        sequence = Sequence(request, version, NOBODY, self.arrivals)
        self.arrivals += 1
        self.scheduler.add(sequence)
        return sequence

    def turn(self) -> bool:
        """Send what can be sent, then take one result back. False when there was nothing to do."""
        while len(self.in_flight) < 2 and (plan := self.scheduler.schedule()):
            step = Step(0, list(plan.loads.values()), plan.admissions, list(plan.rows.values()))
            self.in_flight.append((plan, step))
        if not self.in_flight:
            return False
        plan, step = self.in_flight.popleft()
        self.scheduler.complete(plan, self.rank.execute(step).token_ids, self.eos_ids)
        return True

    def run(self) -> None:
        for _ in range(10_000):
            if not self.turn():
                return
        raise AssertionError("the scheduler never comes to rest")

    def assert_empty(self) -> None:
        assert not self.scheduler.running and not self.scheduler.waiting
        assert self.scheduler.blocks.num_used == 0
        assert self.scheduler.adapters.num_references == 0


def output(sequence: Sequence) -> list[int]:
    return sequence.token_ids[sequence.num_prompt :]


def test_a_lone_request_gets_the_oracles_tokens() -> None:
    server = Server()
    sequence = server.add([1, 2, 3], 10)
    server.run()
    assert output(sequence) == greedy("", [1, 2, 3], 10)
    assert sequence.finish_reason == "length"
    server.assert_empty()


def test_a_prompt_longer_than_the_budget_is_prefilled_in_chunks() -> None:
    server = Server(max_batch_tokens=8)
    prompt = list(range(30))
    sequence = server.add(prompt, 3)
    server.run()
    assert output(sequence) == greedy("", prompt, 3)
    assert [step.rows[0].num_tokens for step in server.rank.steps[:4]] == [8, 8, 8, 6]


def test_decodes_go_before_prefill_chunks() -> None:
    server = Server(max_batch_tokens=8)
    short = server.add([1], 20)
    server.turn()
    server.add(list(range(30)), 2)
    for _ in range(3):
        server.turn()
    rows = [step.rows for step in server.rank.steps if len(step.rows) == 2]
    assert rows and all(row[0].num_tokens == 1 and row[1].num_tokens <= 7 for row in rows)
    server.run()
    assert output(short) == greedy("", [1], 20)


def test_steps_never_exceed_the_token_budget_or_the_slots() -> None:
    server = Server(max_batch_tokens=16, max_running=3)
    for i in range(10):
        server.add(list(range(i, i + 10)), 5)
    server.run()
    assert all(sum(row.num_tokens for row in step.rows) <= 16 and len(step.rows) <= 3 for step in server.rank.steps)
    server.assert_empty()


def test_planning_is_one_step_ahead_of_the_results() -> None:
    server = Server()
    sequence = server.add([1, 2], 5)
    server.turn()
    assert len(sequence.token_ids) == 3 and len(server.in_flight) == 1, "a second step was planned before the first token was known"


def test_no_row_is_wasted_after_the_last_allowed_token() -> None:
    server = Server()
    server.add([1, 2], 5)
    server.run()
    assert len(server.rank.steps) == 5


def test_eos_ends_a_sequence_and_one_row_at_most_is_wasted() -> None:
    tokens = greedy("", [7, 8], 50)
    server = Server(eos=tokens[3])
    sequence = server.add([7, 8], 50)
    server.run()
    assert output(sequence) == tokens[: tokens.index(tokens[3]) + 1] and sequence.finish_reason == "eos_token"
    assert len(server.rank.steps) <= len(output(sequence)) + 1
    server.assert_empty()


def test_the_youngest_is_preempted_and_recomputed_when_blocks_run_out() -> None:
    server = Server(num_blocks=8)
    sequences = [server.add([i] * 6, 16) for i in range(4)]
    server.run()
    assert server.scheduler.num_preemptions > 0
    for i, sequence in enumerate(sequences):
        assert output(sequence) == greedy("", [i] * 6, 16)
    server.assert_empty()


def test_the_oldest_is_never_preempted() -> None:
    server = Server(num_blocks=6)
    first = server.add([1] * 8, 12)
    server.add([2] * 8, 12)
    while not first.is_finished:
        server.turn()
        assert first.slot is not None or first.is_finished


def test_an_aborted_sequence_gives_everything_back_in_any_state() -> None:
    server = Server(num_blocks=8, max_running=2)
    sequences = [server.add([i] * 6, 16, adapter=f"a{i % 2}") for i in range(5)]
    server.turn()
    for sequence in sequences:
        server.scheduler.finish(sequence)
        server.scheduler.finish(sequence)
    server.run()
    server.assert_empty()


def test_a_shared_prefix_is_computed_once() -> None:
    server = Server()
    prompt = list(range(20))
    server.add(prompt, 2)
    server.run()
    again = server.add(prompt, 6)
    server.run()
    assert server.scheduler.num_cached_tokens == 16
    assert output(again) == greedy("", prompt, 6)


def test_a_prompt_that_got_one_token_only_is_remembered_too() -> None:
    server = Server()
    for _ in range(2):
        server.add(list(range(20)), 1)
        server.run()
    assert server.scheduler.num_cached_tokens == 16


def test_a_prefix_is_not_shared_between_adapters_or_with_the_base() -> None:
    server = Server()
    prompt = list(range(20))
    sequences = [server.add(prompt, 6, adapter=name) for name in ("", "a", "b")]
    server.run()
    sequences += [server.add(prompt, 6, adapter=name) for name in ("", "a", "b")]
    server.run()
    for sequence in sequences:
        assert output(sequence) == greedy(sequence.request.adapter_id, prompt, 6)
    assert server.scheduler.num_cached_tokens == 3 * 16


def test_more_adapters_than_pages_take_turns() -> None:
    server = Server(num_pages=2)
    sequences = [server.add([i], 5, adapter=f"a{i}") for i in range(6)]
    server.run()
    for i, sequence in enumerate(sequences):
        assert output(sequence) == greedy(f"a{i}", [i], 5)
    server.assert_empty()


def test_a_request_whose_adapter_finds_no_pages_blocks_nobody() -> None:
    server = Server(num_pages=2)
    long = server.add([1], 40, adapter="big", num_pages=2)
    server.turn()
    starved = server.add([2], 5, adapter="other")
    base = server.add([3], 5)
    while not base.is_finished:
        server.turn()
    assert not long.is_finished and starved.slot is None
    server.run()
    assert output(starved) == greedy("other", [2], 5)


def test_ignoring_the_end_token_goes_on_to_the_limit() -> None:
    tokens = greedy("", [7, 8], 12)
    server = Server(eos=tokens[3])
    sequence = server.add([7, 8], 12)
    sequence.request = msgspec.structs.replace(sequence.request, ignore_eos=True)
    server.run()
    assert output(sequence) == tokens and sequence.finish_reason == "length"


def test_a_preempted_sequence_goes_on_before_those_that_came_later() -> None:
    server = Server(num_blocks=6, max_running=2)
    server.add([1] * 8, 12)
    young, late = server.add([2] * 7, 12), server.add([3], 2)
    while not late.is_finished:
        server.turn()
        assert late.slot is None or young.slot is not None or young.is_finished
    assert server.scheduler.num_preemptions > 0
    server.run()
    assert output(young) == greedy("", [2] * 7, 12)


def test_a_request_is_admitted_only_if_the_running_ones_can_still_grow() -> None:
    server = Server(num_blocks=4)
    server.add([1] * 8, 6)
    server.turn()
    server.add([2] * 8, 1)
    server.run()
    assert server.scheduler.num_preemptions == 0


@pytest.mark.parametrize("seed", range(30))
def test_random_traffic_gets_the_oracles_tokens_and_leaves_nothing_behind(seed: int) -> None:
    rng = random.Random(seed)
    server = Server(
        num_blocks=rng.randint(14, 40),
        num_pages=rng.randint(2, 5),
        max_batch_tokens=rng.choice([5, 16, 64]),
        max_running=rng.randint(1, 8),
        eos=3,
    )
    sequences: list[Sequence] = []
    for _ in range(60):
        if rng.random() < 0.6:
            prompt = [rng.randint(0, 2) for _ in range(rng.randint(1, 30))]
            adapter = rng.choice(["", "a", "b", "c", "d"])
            sequences.append(server.add(prompt, rng.randint(1, 20), adapter, num_pages={"c": 2}.get(adapter, 1)))
        if sequences and rng.random() < 0.15:
            server.scheduler.finish(rng.choice(sequences))
        for _ in range(rng.randint(0, 6)):
            server.turn()
    server.run()
    for sequence in sequences:
        request = sequence.request
        expected = greedy(request.adapter_id, request.prompt_ids, request.max_new_tokens, eos_id=3)
        assert output(sequence) == expected if sequence.finish_reason else output(sequence) == expected[: sequence.num_output]
    server.assert_empty()
