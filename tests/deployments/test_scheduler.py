import random
from typing import Any

import msgspec
import pytest

from loray.deployments.request import GenerationRequest
from loray.deployments.sequence import Sequence
from loray.models.step import CapturedSteps, Pooling, Sampling
from tests.deployments.simulated_rank import embedding, greedy
from tests.deployments.stepped_scheduler import BLOCK, NOBODY, Server


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


@pytest.mark.parametrize(("grammar", "finish_reason"), [(b"", ""), (b"any", "eos_token")])
def test_a_text_that_its_grammar_has_ended_ends_even_where_eos_is_ignored(grammar: bytes, finish_reason: str) -> None:
    sampling = Sampling(grammar=grammar)
    request = GenerationRequest(request_id="r", prompt_ids=[1], max_new_tokens=9, ignore_eos=True, sampling=sampling)
    sequence = Sequence(request, None, NOBODY, 0)
    sequence.append(7, {7})
    assert sequence.finish_reason == finish_reason


def test_the_youngest_is_preempted_and_recomputed_when_blocks_run_out() -> None:
    server = Server(num_blocks=8)
    sequences = [server.add([i] * 6, 16) for i in range(4)]
    server.run()
    assert server.scheduler.num_preemptions > 0
    for i, sequence in enumerate(sequences):
        assert output(sequence) == greedy("", [i] * 6, 16)
    server.assert_empty()


def test_a_preempted_sequence_comes_back_with_prompt_and_output_told_apart() -> None:
    server = Server(num_blocks=6)
    prompts = [[i] * 5 for i in range(3)]
    requests = [
        GenerationRequest(request_id=str(i), prompt_ids=prompt, max_new_tokens=12, sampling=Sampling(), wants_prompt_logprobs=True)
        for i, prompt in enumerate(prompts)
    ]
    for request in requests:
        server._add(request, None)
    server.run()
    admissions = [admission for step in server.rank.steps for admission in step.admissions]
    assert server.scheduler.num_preemptions > 0 and any(admission.num_output for admission in admissions)
    for admission in admissions:
        assert admission.token_ids[: len(admission.token_ids) - admission.num_output] in prompts
        assert admission.wants_prompt_logprobs == (admission.num_output == 0), "they came with the first token"
    server.assert_empty()


def test_the_oldest_is_never_preempted() -> None:
    server = Server(num_blocks=6)
    first = server.add([1] * 8, 12)
    server.add([2] * 8, 12)
    while not first.is_finished:
        server.turn()
        assert first.slot is not None or first.is_finished


def test_a_row_that_gives_way_to_one_planned_after_it_is_not_charged() -> None:
    server = Server(num_blocks=6)
    old, young, other = server.add([1] * 2, 40), server.add([2] * 6, 40), server.add([3] * 2, 40, adapter="b")
    while not server.scheduler.num_preemptions:
        before = server.scheduler.waiting.served(old)
        plan = server.plan()
    assert plan and list(plan.rows) == [old, other] and young.slot is None
    assert server.scheduler.waiting.served(old) - before == 1


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
    server = Server(num_blocks=5)
    server.add([1] * 8, 6)
    server.plan()
    server.add([2] * 8, 3)
    server.run()
    assert server.scheduler.num_preemptions == 0


def test_a_preempted_sequence_waits_for_its_tokens_that_are_on_their_way() -> None:
    server = Server(num_blocks=4)
    old, young = server.add([1] * 4, 12), server.add([2] * 4, 12)
    while young.slot is not None or not server.in_flight:
        assert server.plan()
    server.scheduler.finish(old)
    assert young.num_unknown and server.scheduler.blocks.num_free == 4
    assert server.plan() is None, "its admission would lack tokens that nobody knows yet"
    server.run()
    assert output(young) == greedy("", [2] * 4, 12)
    server.assert_empty()


def test_a_preempted_sequence_keeps_the_moments_of_its_first_slot_and_its_first_token() -> None:
    server = Server(num_blocks=4)
    server.add([1] * 4, 12)
    young = server.add([2] * 4, 12)
    server.turn()
    moments = young.queue_s, young.first_token_at
    assert all(moments) and young.num_output == 1
    server.run()
    admitted = [admission.num_output for step in server.rank.steps for admission in step.admissions if admission.token_ids[0] == 2]
    assert len(admitted) > 1, "it was preempted"
    assert (young.queue_s, young.first_token_at) == moments


def test_a_preempted_sequence_that_is_aborted_leaves_nothing_behind() -> None:
    server = Server(num_blocks=4)
    server.add([1] * 4, 12)
    young = server.add([2] * 4, 12)
    while young.slot is not None or not server.in_flight:
        assert server.plan()
    assert server.scheduler._preempted == {young}
    server.scheduler.finish(young)
    server.run()
    server.assert_empty()


def test_a_step_in_which_an_adapter_gives_way_admits_none_of_its() -> None:
    server = Server(num_blocks=5)
    server.add([1] * 4, 16)
    young = server.add([2] * 8, 12)
    for _ in range(5):
        assert server.plan()
    late = server.add([3], 2)
    plan = server.plan()
    assert young.slot is None and server.scheduler.blocks.num_free == 2, "there is room for the late one"
    assert plan and plan.admissions == [] and late.slot is None
    server.run()
    assert output(young) == greedy("", [2] * 8, 12) and output(late) == greedy("", [3], 2)


def test_without_a_prefix_cache_every_token_is_computed_again() -> None:
    server = Server(has_cache=False)
    for _ in range(2):
        sequence = server.add(list(range(20)), 6)
        server.run()
        assert output(sequence) == greedy("", list(range(20)), 6)
    assert server.scheduler.num_cached_tokens == server.scheduler.blocks.num_cached == 0
    server.assert_empty()


@pytest.mark.parametrize("seed", range(40))
def test_random_traffic_gets_the_oracles_tokens_and_leaves_nothing_behind(seed: int) -> None:
    rng = random.Random(seed)
    server = Server(
        num_blocks=rng.randint(14, 40),
        num_pages=rng.randint(2, 5),
        max_batch_tokens=rng.choice([5, 16, 64]),
        max_running=rng.randint(1, 8),
        eos=3,
        weights={adapter: rng.choice([0.1, 1.0, 3.0]) for adapter in ("", "a", "c")},
        captured=CapturedSteps(max_tokens=12, max_scores=200) if seed % 2 else None,
    )
    sequences: list[Sequence] = []
    for _ in range(60):
        if rng.random() < 0.6:
            prompt = [rng.randint(0, 2) for _ in range(rng.randint(1, 30))]
            adapter = rng.choice(["", "a", "b", "c", "d"])
            pooling: Pooling = "mean" if rng.random() < 0.3 else ""
            max_new_tokens = 1 if pooling else rng.randint(1, 20)
            sequences.append(server.add(prompt, max_new_tokens, adapter, {"c": 2}.get(adapter, 1), pooling))
            if (added := sequences[-1].adapter) and not added.page_ids:
                added.is_ready = rng.random() < 0.7
        if sequences and rng.random() < 0.15:
            server.scheduler.finish(rng.choice(sequences))
        for _ in range(rng.randint(0, 6)):
            server.turn()
    for sequence in sequences:
        if sequence.adapter:
            sequence.adapter.is_ready = True
    server.run()
    for sequence in sequences:
        request = sequence.request
        if request.pooling:
            expected_one = embedding(request.adapter_id, request.prompt_ids)
            assert server.embeddings.get(sequence, expected_one) == expected_one
            assert (sequence in server.embeddings) == bool(sequence.finish_reason) and output(sequence) == []
            continue
        expected = greedy(request.adapter_id, request.prompt_ids, request.max_new_tokens, eos_id=3)
        assert output(sequence) == expected if sequence.finish_reason else output(sequence) == expected[: sequence.num_output]
    server.assert_empty()


def test_two_versions_of_an_adapter_share_no_prefix() -> None:
    server = Server(num_pages=8)
    prompt = list(range(4 * BLOCK))
    for version in ("v1", "v2"):
        sequence = server.add_version("same id", version, prompt, 4)
        server.run()
        assert output(sequence) == greedy(version, prompt, 4)
    assert server.scheduler.num_cached_tokens == 0, "what the first computed is of no use to the second"
    server.add_version("same id", "v2", prompt, 4)
    server.run()
    assert server.scheduler.num_cached_tokens == 3 * BLOCK


def test_an_adapter_comes_into_the_pool_a_step_before_its_sequences_start_and_no_other_waits() -> None:
    server = Server()
    running = server.add([1, 2], 20)
    server.turn()
    first, second = server.add([3, 4], 4, adapter="a"), server.add([5], 4, adapter="a")
    server.turn()
    server.run()
    steps = server.rank.steps
    [loading] = [number for number, step in enumerate(steps) if step.loads]
    starting = {number for number, step in enumerate(steps) for admission in step.admissions if admission.page_ids}
    assert starting == {loading + 1}
    assert all(step.rows for step in steps[:20])  # those that run go on meanwhile
    assert output(running) == greedy("", [1, 2], 20) and output(first) == greedy("a", [3, 4], 4) and output(second) == greedy("a", [5], 4)


@pytest.mark.parametrize(("captured", "is_busy", "num_loads"), [(True, True, [1, 1, 1]), (True, False, [3]), (False, True, [3])])
def test_beside_others_copies_that_run_beside_the_steps_begin_one_a_step(captured: bool, is_busy: bool, num_loads: list[int]) -> None:
    server = Server(captured=CapturedSteps(max_tokens=32, max_scores=1000) if captured else None)
    running = server.add([1, 2], 20) if is_busy else None
    server.turn()
    wanted = {name: server.add([3], 4, adapter=name) for name in ("a", "b", "c")}
    server.run()
    steps = server.rank.steps
    assert [len(step.loads) for step in steps if step.loads] == num_loads
    first = next(number for number, step in enumerate(steps) if step.loads)
    assert [len(step.loads) for step in steps[first:] if step.loads] == [
        len(step.admissions) for step in steps[first + 1 :] if step.admissions
    ]
    assert {name: output(sequence) for name, sequence in wanted.items()} == {name: greedy(name, [3], 4) for name in wanted}
    assert running is None or output(running) == greedy("", [1, 2], 20)


def test_forty_adapters_that_come_one_by_one_leave_no_slot_empty_meanwhile() -> None:
    captured = CapturedSteps(max_tokens=512, max_scores=100_000)
    server = Server(num_blocks=2000, num_pages=64, max_batch_tokens=512, max_running=48, captured=captured)
    for i in range(48):
        server.add([i, 1], 400)
    while not server.rank.steps or len(server.rank.steps[-1].rows) < 48:
        server.turn()
    first = len(server.rank.steps)
    cold = [server.add([3], 100, adapter=f"a{i}") for i in range(40)]
    while any(sequence.slot is None and not sequence.is_finished for sequence in cold):
        server.turn()
    steps = server.rank.steps[first:]
    assert all(len(step.loads) <= 1 for step in steps) and sum(len(step.loads) for step in steps) == 40
    assert min(len(step.rows) for step in steps) >= 46
    assert server.scheduler.num_preemptions <= 40
    server.run()
    server.assert_empty()


def test_a_step_looks_at_few_of_many_adapters_that_wait_for_their_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server(num_blocks=2000, num_pages=600, max_running=600, captured=CapturedSteps(max_tokens=32, max_scores=1000))
    server.add([1, 2], 50)
    server.turn()
    for i in range(500):
        server.add([3], 4, adapter=f"a{i}")
    looked_at = 0
    fits = server.scheduler._fits

    def counted(*args: Any) -> bool:
        nonlocal looked_at
        looked_at += 1
        return fits(*args)

    monkeypatch.setattr(server.scheduler, "_fits", counted)
    for _ in range(10):
        server.turn()
    assert looked_at < 10 * 10
    server.run()
    server.assert_empty()


def test_a_step_that_is_too_long_to_be_replayed_outlasts_many_copies() -> None:
    server = Server(captured=CapturedSteps(max_tokens=8, max_scores=1000), num_blocks=200, max_batch_tokens=64)
    server.add(list(range(500)), 4)
    server.turn()
    for name in ("a", "b", "c"):
        server.add([3], 4, adapter=name)
    server.run()
    assert [len(step.loads) for step in server.rank.steps if step.loads] == [3]


def test_what_starts_in_the_next_step_finds_its_blocks_though_others_come_in_between() -> None:
    server = Server(num_blocks=4)
    late = server.add(list(range(12)), 4, adapter="a")  # three of the four blocks
    small = server.add([1] * 8, 4)
    server.plan()
    assert small.slot is None  # else nothing would be left for the one whose adapter is on its way
    server.run()
    assert output(late) == greedy("a", list(range(12)), 4) and output(small) == greedy("", [1] * 8, 4)


def planned(server: Server) -> list[int]:
    """Tokens of each row of the next step."""
    plan = server.plan()
    return [row.num_tokens for row in plan.rows.values()] if plan else []


def test_prompts_wait_for_the_next_step_that_would_make_this_one_too_large_to_be_replayed() -> None:
    server = Server(captured=CapturedSteps(max_tokens=12, max_scores=1000))
    for start in range(4):
        server.add(list(range(start * 10, start * 10 + 5)), 3)
    assert planned(server) == [5, 5]
    assert planned(server) == [1, 1, 5, 5]
    assert server.complete() and planned(server) == [1, 1, 1, 1]


def test_keys_that_are_read_count_as_tokens_do() -> None:
    server = Server(captured=CapturedSteps(max_tokens=32, max_scores=40))
    for start in range(2):
        server.add(list(range(start * 10, start * 10 + 8)), 1)  # 36 pairs each
    assert planned(server) == [8]
    assert planned(server) == [8]


def test_a_prompt_that_is_too_long_for_that_anyway_takes_the_whole_budget_and_others_with_it() -> None:
    server = Server(captured=CapturedSteps(max_tokens=12, max_scores=1000), max_batch_tokens=32)
    for size in (20, 5, 40):
        server.add(list(range(size)), 1)
    assert planned(server) == [20, 5, 7]
    assert planned(server) == [32]
    assert planned(server) == [1]


def test_a_cached_prefix_is_no_part_of_what_a_step_computes() -> None:
    server = Server(captured=CapturedSteps(max_tokens=12, max_scores=1000))
    server.add(list(range(20)), 1)
    while server.turn():
        pass
    for last in (100, 200, 300):
        server.add([*range(20), last, last + 1], 1)
    assert planned(server) == [2, 2, 2]


def test_embeddings_wait_for_nobody_since_they_are_never_replayed() -> None:
    server = Server(captured=CapturedSteps(max_tokens=12, max_scores=1000))
    for start in range(4):
        server.embed(list(range(start * 10, start * 10 + 5)))
    assert planned(server) == [5, 5, 5, 5]


def test_with_and_without_captured_steps_the_tokens_are_the_same() -> None:
    outputs = []
    for captured in (None, CapturedSteps(max_tokens=9, max_scores=60)):
        server = Server(num_blocks=24, captured=captured)
        sequences = [server.add(list(range(i, i + 3 + 4 * (i % 3))), 6, f"adapter{i % 4}") for i in range(12)]
        while server.turn():
            pass
        outputs.append([sequence.token_ids for sequence in sequences])
    assert outputs[0] == outputs[1]
