"""Every sampling parameter, against transformers' processors and plain Python; and no row ever minds its neighbours."""

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    WatermarkDetector,
    WatermarkingConfig,
    WatermarkLogitsProcessor,
)

from loray.kernels.greedy import LOWEST_LOGPROB
from loray.models import slot_sampling
from loray.models.grammar_masks import GrammarMasks
from loray.models.sampler import LOWEST_TEMPERATURE
from loray.models.slot_sampling import Sampled, SlotSampling
from loray.models.step import Admission, Sampling

VOCAB, COLUMNS = 60, 64
MARK = {"greenlist_ratio": 0.5, "bias": 2.0, "hashing_key": 15485863, "seeding_scheme": "lefthash", "context_width": 1}


class Rank:
    """Slots whose logits the test makes up."""

    def __init__(self, num_slots: int = 16) -> None:
        self.tokens = torch.zeros(num_slots, COLUMNS, dtype=torch.int32)
        self.sampling = SlotSampling(self.tokens, GrammarMasks(Path("no model")))

    def admit(self, slot: int, prompt: list[int], output: list[int], sampling: Sampling) -> None:
        self.sampling.admit([Admission(slot, prompt + output, [], 0, [], sampling, num_output=len(output))])
        self.tokens[slot] = 7  # whatever the slot held before
        self.tokens[slot, : len(prompt + output)] = torch.tensor(prompt + output, dtype=torch.int32)

    def sample(self, logits: Tensor, slots: list[int], positions: list[int]) -> Sampled:
        return self.sampling.fetch(self.sampling.sample(logits, np.array(slots), np.array(positions)))


def logits_of(num_rows: int, seed: int = 0, scale: float = 2.0) -> Tensor:
    return torch.randn(num_rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * scale


def shaped(logits: Tensor, prompt: list[int], output: list[int], **settings: Any) -> Tensor:
    """[vocab_size] what a row's tokens are drawn from."""
    rank = Rank(1)
    rank.admit(0, prompt, output, Sampling(**settings))
    rows = rank.sampling._rows[[0]]
    rows["position"] = len(prompt + output)
    return rank.sampling._scores(logits[None], np.array([0]), rows)[0]


@pytest.mark.parametrize("penalty", [0.5, 1.3, 7.0])
def test_the_repetition_penalty_is_transformers_over_prompt_and_output(penalty: float) -> None:
    logits, prompt, output = logits_of(1)[0], [1, 2, 3, 3, 59], [4, 4, 2]
    expected = RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([prompt + output]), logits[None])[0]
    torch.testing.assert_close(shaped(logits, prompt, output, repetition_penalty=penalty), expected)


@pytest.mark.parametrize(
    "settings", [{"repetition_penalty": value} for value in (1e39, 3e38, 1e36, 1e-38, 1e-320)] + [{"presence_penalty": 1e39}]
)
def test_however_large_a_penalty_scores_stay_numbers_at_any_temperature(settings: dict[str, float]) -> None:
    logits = logits_of(1)[0]
    logits[3], logits[4], logits[5] = 0.0, -9.0, float("-inf")
    found = shaped(logits, [1, 3, 4, 5], [3, 4, 6], **settings)
    assert found[5] == float("-inf") and (found / LOWEST_TEMPERATURE)[found != found[5]].isfinite().all()
    assert found.isneginf().sum() == 1 and not found.isnan().any()


@pytest.mark.parametrize(("frequency", "presence"), [(0.5, 0.0), (0.0, 1.5), (-2.0, 2.0)])
def test_frequency_and_presence_count_the_output_alone(frequency: float, presence: float) -> None:
    logits, prompt, output = logits_of(1)[0], [1, 2, 3, 3], [4, 4, 2, 4]
    counts = Counter(output)
    expected = [float(logits[i]) - frequency * counts[i] - presence * (counts[i] > 0) for i in range(VOCAB)]
    found = shaped(logits, prompt, output, frequency_penalty=frequency, presence_penalty=presence)
    torch.testing.assert_close(found, torch.tensor(expected))


def test_biases_are_added_and_those_of_unknown_tokens_do_nothing() -> None:
    logits = logits_of(1)[0]
    expected = SequenceBiasLogitsProcessor([[[3], 1.5], [[9], -100.0]])(torch.tensor([[1]]), logits[None])[0]
    torch.testing.assert_close(shaped(logits, [1], [], logit_bias={3: 1.5, 9: -100.0, VOCAB: 5.0, -1: 5.0}), expected)


@pytest.mark.parametrize("num_output", [0, 2, 3, 4])
def test_a_text_does_not_end_before_min_new_tokens(num_output: int) -> None:
    logits, output = logits_of(1)[0], [5] * num_output
    processor = MinNewTokensLengthLogitsProcessor(2, 3, [1, 8], device="cpu")
    expected = processor(torch.tensor([[2, 3, *output]]), logits[None])[0]
    torch.testing.assert_close(shaped(logits, [2, 3], output, min_new_tokens=3, stop_ids=[1, 8, VOCAB + 5]), expected)


def test_the_watermark_is_found_by_transformers_detector() -> None:
    logits = logits_of(1)[0]
    processor = WatermarkLogitsProcessor(VOCAB, "cpu", **MARK)
    torch.testing.assert_close(shaped(logits, [1, 5], [11], watermark=True), processor(torch.tensor([[1, 5, 11]]), logits[None])[0])
    config = type("Config", (), {"vocab_size": VOCAB, "bos_token_id": 0, "is_encoder_decoder": False})()
    detector = WatermarkDetector(config, "cpu", WatermarkingConfig(**MARK), ignore_repeated_ngrams=True)
    scores = {}
    for watermark in (True, False):
        rank = Rank(1)
        rank.admit(0, [1], [], Sampling(temperature=1.0, seed=3, watermark=watermark))
        for position in range(1, COLUMNS):
            rank.sample(logits_of(1, position, 1.0), [0], [position])
        scores[watermark] = float(detector(rank.tokens.long(), return_dict=True).z_score[0])
    assert scores[True] > 4 > 2 > scores[False], scores


def test_all_together_come_in_transformers_order() -> None:
    logits, prompt, output = logits_of(1)[0], [1, 2, 3], [4, 4]
    settings = {"repetition_penalty": 1.4, "logit_bias": {4: 3.0, 2: -1.0}, "watermark": True, "min_new_tokens": 5, "stop_ids": [8]}
    processors = [
        RepetitionPenaltyLogitsProcessor(1.4),
        SequenceBiasLogitsProcessor([[[4], 3.0], [[2], -1.0]]),
        WatermarkLogitsProcessor(VOCAB, "cpu", **MARK),
        MinNewTokensLengthLogitsProcessor(3, 5, [8], device="cpu"),
    ]
    expected = LogitsProcessorList(processors)(torch.tensor([prompt + output]), logits[None])[0]
    torch.testing.assert_close(shaped(logits, prompt, output, **settings), expected)


def everything_differently(i: int) -> Sampling:
    return Sampling(
        temperature=[0.0, 0.7, 1.0, 1.5][i % 4],
        top_k=[0, 5, 0, 30][i // 2 % 4],
        top_p=[1.0, 0.9, 0.5][i % 3],
        typical_p=[1.0, 0.8, 1.0, 0.3, 0.95][i % 5],
        seed=i,
        repetition_penalty=[1.0, 1.3, 0.8][i // 3 % 3],
        frequency_penalty=[0.0, 0.5, -1.0, 0.0][i % 4],
        presence_penalty=[0.0, 1.0, 0.0, -0.5, 0.0][i % 5],
        logit_bias={i: 4.0, 2 * i: -3.0} if i % 3 else {},
        watermark=i % 7 == 3,
        min_new_tokens=i % 6,
        stop_ids=[1, 2, 3 + i] if i % 6 else [],
        num_alternatives=i % 4,
    )


@pytest.mark.parametrize("tokens_at_once", [100, slot_sampling.TOKENS_AT_ONCE])  # the most that are looked at for penalties
def test_sixteen_rows_that_differ_in_everything_each_get_what_they_get_alone(tokens_at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    shapes, penalise = [], slot_sampling.penalise
    monkeypatch.setattr(slot_sampling, "TOKENS_AT_ONCE", tokens_at_once)
    monkeypatch.setattr(slot_sampling, "penalise", lambda *inputs: (shapes.append(inputs[1].shape), penalise(*inputs))[1])
    prompts = [[(7 * i + j) % VOCAB for j in range(1 + 2 * i)] for i in range(16)]
    together, alone = Rank(), [Rank() for _ in range(16)]
    for slot, prompt in enumerate(prompts):
        for rank in (together, alone[slot]):
            rank.admit(slot, prompt, [], everything_differently(slot))
    generator = np.random.default_rng(0)
    for turn in range(12):
        logits = logits_of(16, turn)
        slots = [int(slot) for slot in generator.permutation(16)]
        positions = [len(prompts[slot]) + turn for slot in slots]
        found = together.sample(logits[slots], slots, positions)
        assert all(LOWEST_LOGPROB <= logprob <= 0 for logprob in found.logprobs)
        for row, (slot, position) in enumerate(zip(slots, positions, strict=True)):
            expected = alone[slot].sample(logits[[slot]], [slot], [position])
            assert (found.token_ids[row], found.logprobs[row]) == (expected.token_ids[0], expected.logprobs[0])
            assert found.alternatives.get(row) == expected.alternatives.get(0)
            assert len(found.alternatives.get(row, [])) == slot % 4
    assert max(num_rows * num_columns for num_rows, num_columns in shapes) <= tokens_at_once
    assert max(num_rows for num_rows, _ in shapes) > 1


def test_a_row_goes_on_alike_after_it_was_recomputed() -> None:
    """As after a preemption, or on another replica: its tokens come back as prompt and output."""
    whole, again = Rank(), Rank()
    prompts = [[(7 * i + j) % VOCAB for j in range(3)] for i in range(16)]
    for slot, prompt in enumerate(prompts):
        whole.admit(slot, prompt, [], everything_differently(slot))
    for turn in range(10):
        if turn == 4:
            for slot, prompt in enumerate(prompts):
                again.admit(slot, prompt, whole.tokens[slot, 3:7].tolist(), everything_differently(slot))
        expected = whole.sample(logits_of(16, turn), list(range(16)), [3 + turn] * 16)
        if turn >= 4:
            assert again.sample(logits_of(16, turn), list(range(16)), [3 + turn] * 16) == expected


def test_logprobs_are_those_of_the_logits_whatever_shapes_them() -> None:
    logits = logits_of(16)
    rank = Rank()
    for slot in range(16):
        rank.admit(slot, [1, 2], [], everything_differently(slot))
    found = rank.sample(logits, list(range(16)), [2] * 16)
    expected = logits.log_softmax(-1)
    torch.testing.assert_close(torch.tensor(found.logprobs), expected[range(16), found.token_ids])
    for row, alternatives in found.alternatives.items():
        top = expected[row].topk(len(alternatives))
        assert [token_id for token_id, _ in alternatives] == top.indices.tolist()
        torch.testing.assert_close(torch.tensor([logprob for _, logprob in alternatives]), top.values)


def test_what_a_slot_held_before_is_forgotten() -> None:
    used = Rank(1)
    for later in (Sampling(), Sampling(presence_penalty=0.1), Sampling(min_new_tokens=2, stop_ids=[0])):
        used.admit(0, [1], [], everything_differently(5))
        used.sample(logits_of(1), [0], [1])
        fresh = Rank(1)
        for rank in (used, fresh):
            rank.admit(0, [1, 2], [], later)
        for turn in range(5):
            logits = logits_of(1, turn)
            logits[:, [5, 8]] += 4  # that the slot's earlier sequence had a bias, or was not to end with
            assert used.sample(logits, [0], [2 + turn]) == fresh.sample(logits, [0], [2 + turn])


@pytest.mark.parametrize("temperature", [1e30, 1e300, float("inf")])
def test_what_must_not_come_does_not_however_high_the_temperature(temperature: float) -> None:
    rank = Rank()
    for slot in range(16):
        stop_ids = list(range(2, VOCAB))
        rank.admit(slot, [1, 2], [], Sampling(temperature=temperature, seed=slot, min_new_tokens=3, stop_ids=stop_ids))
    found = rank.sample(logits_of(16), list(range(16)), [2] * 16)
    assert set(found.token_ids) == {0, 1}


def test_plain_rows_take_the_most_probable_token_and_want_no_other() -> None:
    rank = Rank()
    others = Sampling(temperature=1.0), Sampling(num_alternatives=1), Sampling(logit_bias={3: 1.0})
    for slot, sampling in enumerate((Sampling(), Sampling(top_k=5, seed=3), *others)):
        rank.admit(slot, [1, 2], [], sampling)
    assert rank.sampling.is_plain(np.array([0, 1]))
    assert not any(rank.sampling.is_plain(np.array([0, slot])) for slot in (2, 3, 4))


def test_values_that_no_client_should_send_harm_no_other_row() -> None:
    logits = logits_of(2)
    for settings in (
        {"temperature": float("inf"), "min_new_tokens": 2**62, "stop_ids": [2**62, -1, 3]},
        {"temperature": 1.0, "repetition_penalty": 1e300, "frequency_penalty": -1e300},
        {"temperature": 1.0, "top_p": 1e-300, "typical_p": 1e-300, "logit_bias": {2**63: 1.0, 4: float("inf"), 5: float("-inf")}},
        {"num_alternatives": 10**6, "seed": 2**63 - 1},
    ):
        rank = Rank(2)
        rank.admit(0, [1, 2], [3], Sampling(**settings))
        rank.admit(1, [1, 2], [3], Sampling())
        found = rank.sample(logits, [0, 1], [3, 3])
        assert found.token_ids[1] == int(logits[1].argmax()) and 0 <= found.token_ids[0] < VOCAB
        assert all(LOWEST_LOGPROB <= logprob <= 0 for logprob in found.logprobs)
