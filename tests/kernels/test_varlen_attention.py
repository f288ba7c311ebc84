"""Prefill attention over contiguous sequences, and the gathering of cached prefixes for it, against their definition.

With TRITON_INTERPRET=1 the gathering kernel runs without a GPU: `TRITON_INTERPRET=1 pytest -m gpu tests/kernels/test_varlen_attention.py`.
"""

from collections.abc import Iterator

import pytest
import torch

from loray.kernels import varlen_attention as module
from loray.kernels.attention import Scoring
from loray.kernels.prefix_gather import gather_prefix
from loray.kernels.varlen_attention import FLASH_ATTN, PLAIN, TORCH_VARLEN, TRITON, backend, shown_backend, varlen_attention
from tests.kernels.test_paged_attention import COMPILED, DEVICE, HEADS, SCORINGS, PagedCase, assert_equal
from tests.kernels.test_paged_prefill import BATCHES, prompts_of, starts_of
from tests.kernels.triton_marks import DTYPES, ON_GPU, REAL_GPU


def assert_gathered(case: PagedCase, k: torch.Tensor, v: torch.Tensor) -> None:
    assert k.is_contiguous() and v.is_contiguous()
    assert torch.equal(k.double().cpu(), torch.cat(case.keys)) and torch.equal(v.double().cpu(), torch.cat(case.values))


@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_the_twin_gathers_each_sequence_behind_the_last(heads: tuple[int, int, int]) -> None:
    context_lens = [1, 0, 17, 32, 90]
    case = PagedCase(context_lens, heads, torch.float32)
    assert_gathered(case, *gather_prefix(case.cache, case.table, starts_of(context_lens), sum(context_lens)))


@pytest.mark.parametrize(("heads", "scored"), COMPILED, ids=str)
@pytest.mark.parametrize("batch", BATCHES)
def test_the_twin_lets_each_query_see_the_keys_up_to_itself(batch: str, heads: tuple[int, int, int], scored: str) -> None:
    q_lens, context_lens = zip(*BATCHES[batch], strict=True)
    case, scoring = PagedCase(context_lens, heads, torch.float32), SCORINGS[scored]
    q, k, v = case.queries(sum(q_lens)), torch.cat(case.keys).float(), torch.cat(case.values).float()
    actual = varlen_attention(q, k, v, prompts_of(q_lens, context_lens), scoring)
    assert_equal(actual, case.expected(q, q_lens, scoring), torch.float32)


def test_without_a_gpu_plain_torch_attends() -> None:
    assert backend(torch.device("cpu"), torch.float32, torch.float32, 64, Scoring(1.0)) == PLAIN


class TestGather:
    pytestmark = ON_GPU

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize("heads", [*HEADS, (8, 8, 128)], ids=str)
    def test_each_sequence_lies_behind_the_last(self, heads: tuple[int, int, int], dtype: torch.dtype) -> None:
        from loray.kernels.prefix_gather_triton import gather_prefix

        context_lens = [1, 0, 17, 32, 90]
        case = PagedCase(context_lens, heads, dtype, DEVICE)
        assert_gathered(case, *gather_prefix(case.cache, case.table, starts_of(context_lens, DEVICE), sum(context_lens)))


@pytest.fixture(autouse=True)
def no_choice_is_remembered() -> Iterator[None]:
    """Tests take flash-attn away where it is installed."""
    backend.cache_clear()
    yield
    backend.cache_clear()


def attends(batch: str, heads: tuple[int, int, int], scoring: Scoring, dtype: torch.dtype, library: str) -> None:
    q_lens, context_lens = zip(*BATCHES[batch], strict=True)
    case = PagedCase(context_lens, heads, dtype, DEVICE)
    q, k, v = (x.to(DEVICE, dtype) for x in (case.queries(sum(q_lens)), torch.cat(case.keys), torch.cat(case.values)))
    assert backend(q.device, dtype, dtype, heads[2], scoring) == library
    actual = varlen_attention(q, k, v, prompts_of(q_lens, context_lens, DEVICE), scoring)
    assert_equal(actual, case.expected(q, q_lens, scoring), dtype)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("batch", BATCHES)
class TestLibraries:
    pytestmark = REAL_GPU

    @pytest.mark.skipif(module._flash_attn() is None, reason="no flash-attn")
    @pytest.mark.parametrize("scored", SCORINGS)
    def test_flash_attn(self, batch: str, heads: tuple[int, int, int], scored: str, dtype: torch.dtype) -> None:
        attends(batch, heads, SCORINGS[scored], dtype, FLASH_ATTN)

    @pytest.mark.parametrize("scored", ["plain", "window"])
    def test_torch(self, batch: str, heads: tuple[int, int, int], scored: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(module, "_flash_attn", lambda: None)
        attends(batch, heads, SCORINGS[scored], dtype, TORCH_VARLEN)


class TestChoice:
    pytestmark = REAL_GPU

    def test_what_the_libraries_refuse_is_left_to_the_paged_kernel(self, monkeypatch: pytest.MonkeyPatch) -> None:
        device, half = torch.device("cuda", torch.cuda.current_device()), torch.float16
        assert backend(device, torch.float32, torch.float32, 64, Scoring(1.0)) == TRITON
        assert backend(device, half, torch.float8_e4m3fn, 64, Scoring(1.0)) == TRITON
        assert backend(device, half, half, 320, Scoring(1.0)) == TRITON
        monkeypatch.setattr(module, "_flash_attn", lambda: None)
        assert backend(device, half, half, 64, Scoring(1.0, cap=5.0)) == TRITON
        assert shown_backend(device, half, half, 64, score_cap=5.0) == "triton paged, prompts triton paged"
        assert shown_backend(device, half, half, 64, score_cap=0.0) == "triton paged, prompts torch varlen"
