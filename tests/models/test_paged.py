"""The way that steps take on a GPU, on a CPU with the kernels' twins: paged attention, padded decodes, results that are fetched late."""

from pathlib import Path

import numpy as np
import pytest
import torch

from loray.models import runner as runner_module
from loray.models.decode_inputs import NUM_IN_TURN, DecodeInputs
from loray.models.layout import lay_out
from loray.models.runner_sizes import RunnerSizes
from loray.models.slot_sampling import Drawn, Sampled, SlotSampling
from loray.models.step import Admission, Row, Sampling, Step
from loray.models.warm_up import StepLimits, warm_up_steps
from tests.models.conductor import Conductor, Request, pipelined, prompt_of
from tests.models.families import FAMILIES, save_family
from tests.models.sampling_jobs import PLAIN, grammar, save_model

PAGES = {"r4": [9], "r16": [7, 3]}


@pytest.fixture
def paged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner_module, "uses_triton", lambda device: True)


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2", "mistral"])
def test_attention_where_the_blocks_lie_gives_the_same_tokens(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    saved = save_family(FAMILIES[name], tmp_path)
    outputs = []
    for is_paged in (False, True):
        monkeypatch.setattr(runner_module, "uses_triton", lambda device, is_paged=is_paged: is_paged)
        conductor = Conductor(saved.base)
        for adapter, page_ids in PAGES.items():
            conductor.load(saved.adapters[adapter], page_ids)
        requests = [Request(prompt_of(5 + 7 * i, seed=i), page_ids) for i, page_ids in enumerate(([], [9], [7, 3], []))]
        outputs.append(conductor.play(requests, chunk=6, stagger=1))
    for expected, found in zip(*outputs, strict=True):
        assert found.token_ids == expected.token_ids
        assert found.logprobs == pytest.approx(expected.logprobs, abs=1e-4)


@pytest.mark.usefixtures("paged")
def test_a_decode_from_fixed_buffers_gives_the_tokens_of_any_other_and_touches_nobody_elses(base: Path) -> None:
    conductor = Conductor(base, max_running=8)
    runner = conductor.runner
    rows = [Row(slot, 5 + slot, conductor.blocks(slot, 0, 5 + slot), True) for slot in (0, 3, 5)]
    admissions = [Admission(row.slot, prompt_of(row.num_tokens, seed=row.slot), [], 0, [], Sampling()) for row in rows]
    conductor.step(rows, admissions)
    assert runner._table is not None and runner._kv_cache is not None
    inputs = DecodeInputs(8, runner._tokens, runner._table.blocks)
    for _ in range(3):
        decodes = [Row(row.slot, 1, [], True) for row in rows]
        layout = lay_out(decodes, runner._slots, 16)
        inputs.fill(layout, num_rows=8)
        tokens, cache = runner._tokens.clone(), [layer.blocks.clone() for layer in runner._kv_cache.layers]
        with torch.inference_mode():
            output = runner._decode(inputs.batch(8, has_lora=False))
            inputs.keep(output.token_ids)
        found, written = output.token_ids[:3].tolist(), runner._tokens.clone()
        changed = (written != tokens).nonzero()[:, 0].unique().tolist()
        assert set(changed) <= {0, 3, 5, 8}  # 8: the row of nobody
        for before, (layer, _) in zip(cache, runner._kv_cache.layers, strict=True):
            where = (layer.view(torch.int32) != before.view(torch.int32)).flatten(2).any(2).nonzero()  # what nobody wrote may be NaN
            assert {int(block) * 16 + int(offset) for block, offset in where} == set(layout.kv_slots.tolist())
        runner._tokens.copy_(tokens)  # the same once more, as other steps are computed
        expected, _, _ = conductor.step(decodes)
        assert found == expected


@pytest.mark.usefixtures("paged")
def test_a_prompts_tokens_can_be_rows_of_their_own(base: Path) -> None:
    """Chunks of prompts beside a decode, from fixed buffers: the tokens that come of it, and what the next steps find in the cache."""
    fixed, usual = Conductor(base, max_running=4), Conductor(base, max_running=4)
    runner = fixed.runner
    assert runner._table is not None
    inputs = DecodeInputs(32, runner._tokens, runner._table.blocks)
    rows = [Row(1, 6, fixed.blocks(1, 0, 6), False), Row(2, 9, fixed.blocks(2, 0, 9), True)]
    admissions = [Admission(1, prompt_of(17, seed=1), [], 0, [], Sampling()), Admission(2, prompt_of(9, seed=2), [], 0, [], Sampling())]
    for conductor in (fixed, usual):
        conductor.step(rows, admissions)
    following = [Row(2, 1, [], True), Row(1, 11, fixed.blocks(1, 6, 17), True)]
    expected, _, _ = usual.step(following)
    with torch.inference_mode():
        runner._extend(Step(0, [], [], following), runner._kv_cache)
        layout = lay_out(following, runner._slots, 16)
        inputs.fill(layout, num_rows=16)
        output = runner._decode(inputs.batch(16, has_lora=False))
        inputs.keep(output.token_ids)
    for row in following:
        runner._slots.num_computed[row.slot] += row.num_tokens
    assert output.token_ids[layout.sample_tokens][layout.result_order].tolist() == expected
    last = [Row(1, 1, fixed.blocks(1, 17, 18), True), Row(2, 1, fixed.blocks(2, 10, 11), True)]
    assert fixed.step(last)[0] == usual.step(last)[0]


@pytest.mark.usefixtures("paged")
def test_what_an_earlier_decode_left_in_the_buffers_does_not_show(base: Path) -> None:
    runner = Conductor(base, max_running=8).runner
    assert runner._table is not None
    inputs = DecodeInputs(8, runner._tokens, runner._table.blocks)
    runner._slots.runs[:4] = [((0, 8),), ((8, 24),), ((8, 24),), ()]
    for rows in (*[[0, 1, 2, 3]] * NUM_IN_TURN, [3, 1]):  # each of the buffers that take turns has had more
        layout = lay_out([Row(slot, 1, [], True) for slot in rows], runner._slots, 16)
        inputs.fill(layout, num_rows=4)
    segments = inputs._segments(4)
    assert segments.blocks.tolist() == [[1, 1, 0, 2], [0, 0, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0]]  # the base model's row comes first
    assert segments.page_ids[:2].tolist() == [1, 2] and segments.is_updated.tolist() == [0, 1, 0, 0]


@pytest.mark.usefixtures("paged")
def test_the_buffers_hold_a_block_of_lora_for_each_sequence_and_one_for_every_16_tokens(base: Path) -> None:
    runner = Conductor(base, max_running=4).runner
    assert runner._table is not None
    inputs = DecodeInputs(64, runner._tokens, runner._table.blocks)
    runner._slots.runs[:4] = [((0, 8),), ((8, 16),), ((16, 24),), ((24, 32),)]
    runner._slots.num_computed[:] = 0
    rows = [Row(slot, count, [], True) for slot, count in enumerate((17, 17, 17, 13))]
    inputs.fill(lay_out(rows, runner._slots, 16), num_rows=64)
    segments = inputs._segments(64)
    expected = [[0, 16, 0, 1], [16, 1, 0, 1], [17, 16, 1, 1], [33, 1, 1, 1], [34, 16, 2, 1], [50, 1, 2, 1], [51, 13, 3, 1], [0, 0, 0, 0]]
    assert segments.blocks.tolist() == expected
    assert segments.page_ids[:4].tolist() == [0, 1, 2, 3] and segments.is_updated.tolist() == [1] * 64


@pytest.mark.usefixtures("paged")
@pytest.mark.parametrize("max_running", [1, 4])
def test_a_warm_runner_gives_the_tokens_of_any_other(base: Path, max_running: int) -> None:
    warm, other = (Conductor(base, max_running=max_running) for _ in range(2))
    for step in warm_up_steps(StepLimits(RunnerSizes(max_running, 128, 16, 48), num_blocks=16, num_pages=4)):
        warm.runner.execute(step)
    request = Request(prompt_of(9), [])
    assert warm.play([request])[0].token_ids == other.play([request])[0].token_ids


def test_results_may_be_fetched_a_step_late_also_where_grammars_need_them_before(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model")
    turns = Sampling(temperature=1.0, seed=3, grammar=grammar(regex="(ab){6}"))  # what is allowed changes with each token
    for samplings in (PLAIN, [Sampling(), turns], [Sampling(watermark=True), Sampling(temperature=0.9, seed=1)]):
        requests = [Request(prompt_of(9, seed=i), [], sampling) for i, sampling in enumerate(samplings)]
        expected = [output.token_ids for output in Conductor(folder).play(requests)]
        assert pipelined(Conductor(folder), requests, num_new=8) == expected


def test_a_grammar_makes_only_the_steps_of_its_own_slot_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save_model(tmp_path / "model")
    conductor = Conductor(folder)
    fetched: list[list[int]] = []
    fetch = SlotSampling.fetch

    def fetch_and_note(sampling: SlotSampling, drawn: Drawn) -> Sampled:
        fetched.append(drawn.slots)
        return fetch(sampling, drawn)

    monkeypatch.setattr(SlotSampling, "fetch", fetch_and_note)
    samplings = [Sampling(temperature=0.8, top_p=0.9, repetition_penalty=1.2), Sampling(grammar=grammar(regex="[ab]*"))]
    admissions = [Admission(slot, [5, 6], [], 0, [], sampling) for slot, sampling in enumerate(samplings)]
    for slot in (0, 1):
        conductor.step([Row(slot, 2, conductor.blocks(slot, 0, 2), True)], [admissions[slot]])
    last, has_waited, waits_for = None, [], []
    for step_id, slots in enumerate(([0], [0], [0, 1], [0, 1], [0], [0]), start=10):
        fetched.clear()
        step = Step(step_id, [], [], [Row(slot, 1, [], True) for slot in slots])
        waits_for.append(conductor.runner.waits_for(step))
        launched = conductor.runner.launch(step)
        has_waited.append(bool(fetched))
        if last:
            last.result()
        last = launched
    assert has_waited == [False, False, False, True, False, False]
    assert waits_for == [False, False, True, True, False, False]


def test_a_matcher_goes_when_its_text_is_whole(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model")
    conductor = Conductor(folder)
    conductor.play([Request(prompt_of(5), sampling=Sampling(grammar=grammar(regex="[ab]")), num_new=2)])
    assert 0 not in conductor.runner.grammars


def test_a_slot_that_is_admitted_anew_with_a_grammar_owes_nothing_to_the_step_before(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model")
    conductor = Conductor(folder)
    prompt = prompt_of(9)
    plain = Step(1, [], [Admission(0, prompt, [], 0, [], Sampling())], [Row(0, 9, conductor.blocks(0, 0, 9), True)])
    bound = Sampling(grammar=grammar(regex="[0-9]{3}"))
    anew = Step(2, [], [Admission(0, prompt, [], 0, [], bound)], [Row(0, 9, conductor.blocks(0, 0, 9), True)])
    first = conductor.runner.launch(plain)
    second = conductor.runner.launch(anew)
    assert not first.result().failed_rows and not second.result().failed_rows


def test_the_layout_puts_decodes_first_then_adapters_in_their_order_and_leads_back() -> None:
    from loray.models.slots import Slots

    slots = Slots.empty(6, 4)
    slots.runs = [((16, 24),), (), ((0, 8),), (), ((16, 24),), ()]
    slots.num_computed[:] = [4, 0, 7, 2, 1, 0]
    rows = [Row(0, 1, [], True), Row(1, 3, [], False), Row(2, 1, [], True), Row(3, 1, [], True), Row(4, 2, [], True)]
    layout = lay_out(rows, slots, 16)
    assert layout.slots.tolist() == [3, 2, 0, 1, 4]
    assert layout.positions.tolist() == [2, 7, 4, 0, 1, 2, 1, 2]
    assert layout.sample_slots.tolist() == [3, 2, 0, 4] and layout.sample_tokens.tolist() == [0, 1, 2, 7]
    assert np.array(["3", "2", "0", "4"])[layout.result_order].tolist() == ["0", "2", "3", "4"]
    assert layout.first_tokens.tolist() == [2, 3, 1, 0, 6]
    assert not layout.is_decode
