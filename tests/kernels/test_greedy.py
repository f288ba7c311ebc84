"""The most probable token against torch in float64: the twin on the CPU, the kernel on a GPU or interpreted (see triton_marks.py)."""

import pytest
import torch
from torch import Tensor

from loray.kernels.greedy import greedy, most_and_total
from tests.kernels.triton_marks import ALL_BACKENDS, DEVICES, DTYPES, IS_INTERPRETED, framed

INF, NAN = float("inf"), float("nan")


def greedy_of(backend: str, logits: Tensor) -> tuple[Tensor, Tensor]:
    logits = logits.to(DEVICES[backend])
    if backend != "triton" or not IS_INTERPRETED:
        tokens, logprobs = greedy(logits)
    else:
        from loray.kernels import greedy_triton

        tokens, logprobs = greedy_triton.greedy(logits)
    assert tokens.dtype == torch.int64 and logprobs.dtype == torch.float32
    return tokens.cpu(), logprobs.cpu()


@pytest.mark.parametrize("backend", ALL_BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_rows", [1, 5])
@pytest.mark.parametrize("vocab_size", [1, 257, 4096, 4097, 49152, 128256])
def test_the_token_and_its_logprob_are_those_of_torch(backend: str, dtype: torch.dtype, num_rows: int, vocab_size: int) -> None:
    _, logits = framed((4 * torch.randn(num_rows, vocab_size)).to(dtype), "cpu")
    tokens, logprobs = greedy_of(backend, logits)
    assert torch.equal(tokens, logits.float().argmax(-1))  # in half precision many are equal: the first of them
    expected = logits.double().log_softmax(-1).gather(1, tokens[:, None]).squeeze(1)
    torch.testing.assert_close(logprobs.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("backend", ALL_BACKENDS)
@pytest.mark.parametrize("places", [[9999, 3, 4097], [4096, 8191], [9999], [0, 4095]], ids=str)
def test_of_equals_the_lowest_id_wins_also_across_chunks(backend: str, places: list[int]) -> None:
    logits = torch.zeros(2, 10_000)
    logits[1, places] = 2.0
    assert greedy_of(backend, logits)[0].tolist() == [0, min(places)]


@pytest.mark.parametrize("backend", ALL_BACKENDS)
def test_nan_never_wins_and_shows_in_the_logprob(backend: str) -> None:
    logits = torch.full((6, 5000), -INF)
    logits[1] = NAN
    logits[2, 4500] = -1e30  # the only one that can be
    logits[3, 17], logits[3, 4999] = NAN, -7.0
    logits[4, 4321] = INF
    logits[5, :], logits[5, 4998] = -3e38, 3e38
    tokens, logprobs = greedy_of(backend, logits)
    assert tokens.tolist() == [0, 0, 4500, 4999, 4321, 4998]
    torch.testing.assert_close(logprobs, torch.tensor([NAN, NAN, 0.0, NAN, NAN, 0.0]), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("backend", ALL_BACKENDS)
def test_the_total_is_the_logsumexp_of_torch(backend: str) -> None:
    _, logits = framed(30 * torch.randn(3, 9000), "cpu")
    logits = logits.to(DEVICES[backend])
    if backend != "triton" or not IS_INTERPRETED:
        tokens, totals = most_and_total(logits)
    else:
        from loray.kernels import greedy_triton

        tokens, totals = greedy_triton.most_and_total(logits)
    assert torch.equal(tokens, logits.argmax(-1))
    torch.testing.assert_close(totals.double(), logits.double().logsumexp(-1))


@pytest.mark.parametrize("backend", ALL_BACKENDS)
def test_a_row_does_not_see_its_neighbours(backend: str) -> None:
    logits = torch.randn(3, 5000)
    alone = [greedy_of(backend, row[None]) for row in logits]
    logits = torch.cat((logits, torch.full((1, 5000), NAN)))
    tokens, logprobs = greedy_of(backend, logits)
    assert tokens[:3].tolist() == [int(token) for token, _ in alone]
    assert logprobs[:3].tolist() == [float(logprob) for _, logprob in alone]
