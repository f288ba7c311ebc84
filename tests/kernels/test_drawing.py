"""Draws against a reference in float64: the twin on the CPU, the kernel on a GPU or interpreted (see triton_marks.py)."""

import itertools
import math

import pytest
import torch
from torch import Tensor
from transformers import TopKLogitsWarper, TopPLogitsWarper

from loray.kernels import drawing
from loray.kernels.drawing import draw
from loray.kernels.noise import gumbel_noise
from tests.kernels.triton_marks import BACKENDS, DEVICES, DTYPES, IS_INTERPRETED, SLOWLY_INTERPRETED, framed

INF = float("inf")
EDGE = 1e-5  # of the mass: by rounding a token may fall to either side
ROUNDING = 1e-4  # of score + noise


def keys_of(num_rows: int, seed: int = 0) -> Tensor:
    return torch.randint(-(2**31), 2**31, (num_rows, 2), generator=torch.Generator().manual_seed(seed)).int()


def limits_of(limits: list[tuple[float, int, float]]) -> tuple[Tensor, Tensor, Tensor]:
    """temperature, top_k and top_p of each row"""
    temperature, top_k, top_p = zip(*limits, strict=True)
    return torch.tensor(temperature), torch.tensor(top_k), torch.tensor(top_p)


def drawn(backend: str, scores: Tensor, limits: tuple[Tensor, Tensor, Tensor], keys: Tensor) -> Tensor:
    tensors = [tensor.to(DEVICES[backend]) for tensor in (scores, *limits, keys)]
    if backend == "triton" and IS_INTERPRETED:
        from loray.kernels import drawing_triton

        tokens = drawing_triton.draw(*tensors)
    else:
        tokens = draw(*tensors)
    assert tokens.dtype == torch.int64
    return tokens.cpu()


def assert_drawn(tokens: Tensor, scores: Tensor, limits: tuple[Tensor, Tensor, Tensor], keys: Tensor) -> None:
    """Each is the largest of score + noise among those that the limits leave, but for rounding."""
    noise = gumbel_noise(keys, scores.shape[1]).double()
    for token, row, temperature, top_k, top_p, row_noise in zip(tokens.tolist(), scores.double(), *limits, noise, strict=True):
        scaled = row / temperature
        ordered = scaled.sort(descending=True).values
        num_left = min(int(top_k) or len(row), len(row))
        mass = ordered[:num_left].softmax(-1)
        before = mass.cumsum(-1) - mass
        surely = max(1, int((before < top_p - EDGE).sum())) if top_p < 1 else num_left
        perhaps = max(1, int((before < top_p + EDGE).sum())) if top_p < 1 else num_left
        least = ordered[perhaps - 1]
        assert scaled[token] >= least - 1e-6 * least.abs()
        noisy = scaled + row_noise
        assert noisy[token] >= noisy[scaled >= ordered[surely - 1]].max() - ROUNDING


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("spread", [0.01, 1.0, 6.0])
@pytest.mark.parametrize(
    "vocab_size",
    [1, 257, *(pytest.param(size, marks=SLOWLY_INTERPRETED) for size in (8192, 12_000)), pytest.param(128256, marks=pytest.mark.slow)],
)
def test_a_draw_is_the_largest_with_its_noise_among_those_that_are_left(
    backend: str, dtype: torch.dtype, spread: float, vocab_size: int
) -> None:
    """Flat rows, steep ones, and in half precision many equal scores."""
    top_ks, top_ps = (0, 1, 40, 1025, vocab_size, vocab_size + 5), (1.0, 0.001, 0.5, 0.95, 0.9999)
    pairs = list(itertools.product(top_ks, top_ps))
    limits = limits_of([(1.3 if i % 2 else 0.7, *pair) for i, pair in enumerate(pairs)])
    _, scores = framed((spread * torch.randn(len(pairs), vocab_size)).to(dtype), "cpu")
    keys = keys_of(len(pairs))
    assert_drawn(drawn(backend, scores, limits, keys), scores, limits, keys)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("top_k", "top_p"), [(0, 1.0), (3, 1.0), (0, 0.7), (4, 0.8)])
@pytest.mark.parametrize("offset", [pytest.param(offset, marks=SLOWLY_INTERPRETED) for offset in (0.0, 100.0, -100.0)])
def test_draws_follow_the_softmax_of_those_that_are_left(backend: str, offset: float, top_k: int, top_p: float) -> None:
    """However large the scores are: exp(100) is infinite."""
    num_draws = 100 if IS_INTERPRETED and backend == "triton" else 40_000
    scores = (torch.tensor([2.0, 1.0, 0.0, -1.0, 1.5]) + offset) / 0.8
    expected = scores[None]
    if top_k:
        expected = TopKLogitsWarper(top_k)(None, expected)
    expected = TopPLogitsWarper(top_p)(None, expected)[0].softmax(-1)
    limits = limits_of([(0.8, top_k, top_p)] * num_draws)
    tokens = drawn(backend, (0.8 * scores).expand(num_draws, 5).clone(), limits, keys_of(num_draws))
    found = torch.bincount(tokens, minlength=5) / num_draws
    assert (found - expected).abs().max() < 4 * math.sqrt(0.25 / num_draws)
    assert not found[expected == 0].any()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("top_k", "top_p"), [(0, 1.0), (40, 1.0), (0, 0.9), (40, 0.9)])
def test_what_must_not_come_does_not_and_where_nothing_may_the_first_does(backend: str, top_k: int, top_p: float) -> None:
    scores = torch.full((4, 9000), -INF)
    scores[1, 8999], scores[2, 17] = -1e30, 3e38
    scores[3, 5000:5008] = 0.5
    tokens = drawn(backend, scores, limits_of([(1.0, top_k, top_p)] * 4), keys_of(4)).tolist()
    assert tokens[:3] == [0, 8999, 17] and 5000 <= tokens[3] < 5008


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_row_does_not_see_its_neighbours(backend: str) -> None:
    cases = [(1.0, 0, 1.0), (0.5, 5, 0.9), (2.0, 0, 0.3), (1.0, 7, 1.0)]
    scores, keys = torch.randn(4, 9000), keys_of(4)
    alone = [drawn(backend, scores[i : i + 1], limits_of([case]), keys[i : i + 1]) for i, case in enumerate(cases)]
    poisoned = torch.cat((scores, torch.full((1, 9000), float("nan"))))
    tokens = drawn(backend, poisoned, limits_of([*cases, (1.0, 9, 0.9)]), keys_of(5))
    assert torch.equal(keys_of(5)[:4], keys) and tokens[:4].tolist() == [int(token) for token in alone]


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_rows_are_no_tokens(backend: str) -> None:
    limits = torch.empty(0), torch.empty(0, dtype=torch.int64), torch.empty(0)
    assert drawn(backend, torch.empty(0, 50), limits, torch.empty(0, 2, dtype=torch.int32)).shape == (0,)


@pytest.mark.parametrize("spread", [0.01, 1.0, 6.0])
@pytest.mark.parametrize(("top_k", "top_p"), [(0, 0.5), (0, 0.999), (40, 0.9), (2000, 0.7), (1024, 0.9), (4999, 0.99)])
def test_the_threshold_of_a_large_vocabulary_is_that_of_transformers(top_k: int, top_p: float, spread: float) -> None:
    """Flat ones need the whole order, steep ones only its beginning."""
    scores = torch.randn(3, 5000, generator=torch.Generator().manual_seed(2)) * spread
    expected = TopKLogitsWarper(top_k)(None, scores) if top_k else scores
    expected = TopPLogitsWarper(top_p)(None, expected).isfinite().sum(-1)
    kept = drawing.kept(scores, torch.full((3,), top_k), torch.full((3,), top_p)).isfinite().sum(-1)
    assert (kept - expected).abs().max() <= 2  # where the mass is reached but for rounding


@pytest.mark.parametrize("vocab_size", [60, 1024, 1025, 3000])
def test_who_does_not_look_at_the_scores_finds_the_same_threshold(vocab_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, where a look would be waited for. Some rows are flat, some steep, some have equal scores."""
    monkeypatch.setattr(drawing, "MAX_ORDERED", 5)
    limits = list(itertools.product((vocab_size, 1, 40, 1024, 1025, 2000), (1.0, 0.001, 0.5, 0.9, 0.9999)))
    top_k, top_p = torch.tensor([[min(k, vocab_size)] for k, _ in limits]), torch.tensor([[p] for _, p in limits])
    scores = torch.randn(len(limits), vocab_size, generator=torch.Generator().manual_seed(4))
    for spread in (0.01, 1.0, 6.0):
        for some in (scores * spread, (scores * spread).round()):
            expected = drawing._threshold_asked(some, top_k, top_p)
            assert torch.equal(drawing._threshold_unasked(some, top_k, top_p), expected)


def test_a_token_at_the_very_edge_of_the_mass_falls_to_the_same_side_for_both() -> None:
    scores = torch.randn(200, 3000, generator=torch.Generator().manual_seed(5)) * 6
    probs = (scores.topk(1024).values - scores.logsumexp(-1, keepdim=True)).exp()
    top_k, top_p = torch.full((200, 1), 3000), (probs.cumsum(-1) - probs)[:, 20:21]
    assert torch.equal(drawing._threshold_unasked(scores, top_k, top_p), drawing._threshold_asked(scores, top_k, top_p))
