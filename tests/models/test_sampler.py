"""Sampling: exact filters, the right distribution, and no dependence on neighbours."""

import math

import numpy as np
import pytest
import torch
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper, TypicalLogitsWarper

from loray.kernels.noise import gumbel_noise
from loray.models.sampler import LOWEST_TEMPERATURE, SAMPLING_ROW, SamplingRows, most_probable, noise_keys, sample

KEYS = [[1949917470, 1581361928], [-2138990865, -1196529408]]
NOISE = [[0.036407, -0.821784, -1.520399], [2.470142, 0.867853, -0.957936]]


def rows_of(num_rows: int, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, first_seed: int = 0) -> SamplingRows:
    rows = np.zeros(num_rows, SAMPLING_ROW)
    rows["temperature"], rows["top_k"], rows["top_p"], rows["typical_p"] = temperature, top_k, top_p, 1
    rows["seed"] = np.arange(first_seed, first_seed + num_rows)
    rows["position"] = np.arange(num_rows) % 7 + 100
    return rows


def test_greedy_takes_the_largest_with_its_log_probability() -> None:
    logits = torch.randn(5, 40, generator=torch.Generator().manual_seed(0)) * 3
    token_ids, logprobs = sample(logits, rows_of(5, temperature=0))
    assert token_ids.tolist() == logits.argmax(-1).tolist()
    torch.testing.assert_close(logprobs, logits.log_softmax(-1).max(-1).values)


@pytest.mark.parametrize("temperature", [1e-40, 1e-38, LOWEST_TEMPERATURE])
def test_a_temperature_that_scores_can_not_be_divided_by_is_greedy(temperature: float) -> None:
    logits = torch.randn(5, 40, generator=torch.Generator().manual_seed(0)) * 30
    assert (logits / 1e-38).isinf().any(), "the first of several infinities would be taken"
    token_ids, logprobs = sample(logits, rows_of(5, temperature, top_p=0.9))
    assert token_ids.tolist() == logits.argmax(-1).tolist() and logprobs.isfinite().all()


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_draws_follow_the_softmax(temperature: float) -> None:
    num_draws = 40_000
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, 1.5])
    token_ids, logprobs = sample(logits.expand(num_draws, 5).clone(), rows_of(num_draws, temperature))
    found = torch.bincount(token_ids, minlength=5) / num_draws
    expected = (logits / temperature).softmax(-1)
    assert (found - expected).abs().max() < 4 * math.sqrt(0.25 / num_draws)
    torch.testing.assert_close(logprobs, logits.log_softmax(-1)[token_ids])  # of the unwarped distribution


def test_the_noise_is_gumbel_and_uncorrelated_over_seeds_positions_and_tokens() -> None:
    for seed, position in ((np.arange(64), np.full(64, 5)), (np.full(64, 7), np.arange(64))):
        noise = gumbel_noise(torch.from_numpy(noise_keys(seed.astype(np.uint64), position)), 5000)
        assert noise.isfinite().all()
        assert float(noise.mean()) == pytest.approx(0.5772, abs=0.01)
        assert float(noise.var()) == pytest.approx(math.pi**2 / 6, abs=0.03)
        correlation = torch.corrcoef(noise) - torch.eye(64)
        assert correlation.abs().max() < 5.5 / math.sqrt(5000)
        assert torch.corrcoef(torch.stack((noise[:, :-1].flatten(), noise[:, 1:].flatten())))[0, 1].abs() < 0.01


def test_the_noise_never_changes() -> None:
    """A stream that resumes on another machine, or after an upgrade, goes on with the same tokens."""
    keys = noise_keys(np.array([1, 2**63 - 1], np.uint64), np.array([0, 4096]))
    assert keys.tolist() == KEYS
    torch.testing.assert_close(gumbel_noise(torch.from_numpy(keys), 3), torch.tensor(NOISE), atol=1e-5, rtol=0)


@pytest.mark.parametrize(("top_k", "top_p"), [(1, 1.0), (5, 1.0), (0, 0.3), (0, 0.9), (8, 0.5), (1000, 0.0)])
def test_filters_keep_exactly_what_transformers_keeps(top_k: int, top_p: float) -> None:
    num_draws, vocab_size = 3000, 30
    logits = torch.randn(vocab_size, generator=torch.Generator().manual_seed(1))
    expected = logits[None]
    if top_k:
        expected = TopKLogitsWarper(min(top_k, vocab_size))(None, expected)
    expected = TopPLogitsWarper(max(top_p, 1e-9))(None, expected)[0]
    token_ids, _ = sample(logits.expand(num_draws, -1).clone(), rows_of(num_draws, 3.0 if top_p == 1 else 1.0, top_k, top_p))
    assert set(token_ids.tolist()) <= set(expected.isfinite().nonzero().flatten().tolist())
    likely = (expected.softmax(-1) > 0.01).nonzero().flatten().tolist()
    assert set(likely) <= set(token_ids.tolist())


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "typical_p"), [(1.0, 0, 1.0, 0.2), (1.0, 0, 1.0, 0.9), (0.7, 0, 0.9, 0.6), (1.5, 12, 0.95, 0.5)]
)
def test_typical_tokens_are_those_that_transformers_keeps(temperature: float, top_k: int, top_p: float, typical_p: float) -> None:
    num_draws, vocab_size = 4000, 30
    logits = torch.randn(vocab_size, generator=torch.Generator().manual_seed(1)) * 1.5
    warpers = [TemperatureLogitsWarper(temperature), TopPLogitsWarper(top_p), TypicalLogitsWarper(typical_p)]
    if top_k:
        warpers.insert(1, TopKLogitsWarper(top_k))
    expected = LogitsProcessorList(warpers)(None, logits[None])[0]
    rows = rows_of(num_draws, temperature, top_k, top_p)
    rows["typical_p"] = typical_p
    token_ids, logprobs = sample(logits.expand(num_draws, -1), rows)
    found = torch.bincount(token_ids, minlength=vocab_size) / num_draws
    assert set(token_ids.tolist()) <= set(expected.isfinite().nonzero().flatten().tolist())
    assert (found - expected.softmax(-1)).abs().max() < 4 * math.sqrt(0.25 / num_draws)
    torch.testing.assert_close(logprobs, logits.log_softmax(-1)[token_ids])


def test_a_typical_p_that_all_tokens_together_miss_by_rounding_gives_a_token() -> None:
    vocab_size = 49152
    logits = torch.randn(64, vocab_size, generator=torch.Generator().manual_seed(0)) * 2
    rows = rows_of(64)
    rows["typical_p"] = np.nextafter(np.float32(1), np.float32(0))
    assert (logits.softmax(-1).cumsum(-1)[:, -1] < float(rows["typical_p"][0])).any(), "what this is about"
    token_ids, logprobs = sample(logits, rows)
    assert ((token_ids >= 0) & (token_ids < vocab_size)).all() and logprobs.isfinite().all()


def test_the_most_probable_tokens_come_with_their_log_probabilities() -> None:
    logits = torch.randn(3, 40, generator=torch.Generator().manual_seed(0)) * 3
    token_ids, logprobs = most_probable(logits, 5)
    expected = logits.log_softmax(-1).topk(5)
    assert token_ids.tolist() == expected.indices.tolist()
    torch.testing.assert_close(logprobs, expected.values)
    assert most_probable(logits, 100)[0].shape == (3, 40), "there are no more than the vocabulary has"


def test_a_row_draws_the_same_alone_and_among_other_kinds_of_rows() -> None:
    logits = torch.randn(6, 50, generator=torch.Generator().manual_seed(2))
    rows = rows_of(6)
    rows["temperature"] = [0, 1, 0.5, 1, 0, 2]
    rows["top_k"] = [0, 0, 5, 30, 3, 0]
    rows["top_p"] = [1, 1, 0.9, 0.5, 1, 0.8]
    rows["typical_p"] = [1, 0.4, 0.9, 1, 0.3, 0.2]
    rows["seed"] = [3, 1, 4, 1, 5, 9]
    together = sample(logits.clone(), rows)
    for i in range(6):
        alone = sample(logits[i : i + 1].clone(), rows[i : i + 1])
        assert (alone[0][0], alone[1][0]) == (together[0][i], together[1][i])


def test_seed_and_position_both_matter() -> None:
    logits = torch.zeros(200, 1000)
    by_seed, _ = sample(logits.clone(), rows_of(200))
    rows = rows_of(200)
    rows["seed"], rows["position"] = 0, np.arange(200)
    same_seed, _ = sample(logits.clone(), rows)
    assert len(set(by_seed.tolist())) > 150
    assert len(set(same_seed.tolist())) > 150


def test_logits_that_make_no_distribution_show_in_the_logprobs_and_still_give_a_token() -> None:
    logits = torch.zeros(4, 10)
    logits[0] = float("nan")
    logits[1] = float("-inf")
    logits[2, 3] = float("inf")
    for temperature in (0.0, 1.0):
        token_ids, logprobs = sample(logits.clone(), rows_of(4, temperature, top_p=0.9))
        assert logprobs.isnan().tolist() == [True, True, True, False]
        assert ((token_ids >= 0) & (token_ids < 10)).all()
        assert float(logprobs[3]) == pytest.approx(-math.log(10))
