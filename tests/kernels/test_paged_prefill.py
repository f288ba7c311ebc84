"""Prefill attention over the paged cache against its definition in float64, with all memory that nobody may read poisoned.

With TRITON_INTERPRET=1 the GPU's kernel runs without a GPU: `TRITON_INTERPRET=1 pytest -m gpu tests/kernels/test_paged_prefill.py`.
"""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from loray.kernels.attention import PromptWork, Scoring
from loray.kernels.paged_prefill import paged_prefill
from tests.kernels.test_paged_attention import COMPILED, COMPILED_FLOAT8, DEVICE, SCORINGS, PagedCase, assert_equal
from tests.kernels.triton_marks import DTYPES, ON_GPU

BATCHES = {  # of each sequence: its queries, and its keys with them
    "fresh prompts": [(1, 1), (33, 33), (2, 2)],
    "chunks behind a prefix": [(5, 37), (1, 90), (40, 41)],
    "one that has none": [(0, 3), (19, 70), (0, 0)],
}


def starts_of(lens: Sequence[int], device: str = "cpu") -> Tensor:
    return torch.tensor([0, *lens], dtype=torch.int32, device=device).cumsum(0, dtype=torch.int32)


def prompts_of(q_lens: Sequence[int], context_lens: Sequence[int], device: str = "cpu") -> PromptWork:
    firsts = starts_of(q_lens, device), starts_of(context_lens, device)
    return PromptWork(*firsts, sum(context_lens), max(q_lens), max(context_lens))


@pytest.mark.parametrize(("heads", "scored"), COMPILED, ids=str)
@pytest.mark.parametrize("batch", BATCHES)
def test_the_twin_lets_each_query_see_the_keys_up_to_itself(batch: str, heads: tuple[int, int, int], scored: str) -> None:
    q_lens, context_lens = zip(*BATCHES[batch], strict=True)
    case, scoring = PagedCase(context_lens, heads, torch.float32), SCORINGS[scored]
    q = case.queries(sum(q_lens))
    actual = paged_prefill(q, case.kv(), prompts_of(q_lens, context_lens), scoring)
    assert_equal(actual, case.expected(q, q_lens, scoring), torch.float32)


class TestKernel:
    pytestmark = ON_GPU

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize(("heads", "scored"), [*COMPILED, ((2, 1, 320), "plain")], ids=str)
    @pytest.mark.parametrize("batch", BATCHES)
    def test_each_query_sees_the_keys_up_to_itself(self, batch: str, heads: tuple[int, int, int], scored: str, dtype: torch.dtype) -> None:
        from loray.kernels.paged_prefill_triton import paged_prefill

        q_lens, context_lens = zip(*BATCHES[batch], strict=True)
        case, scoring = PagedCase(context_lens, heads, dtype, DEVICE), SCORINGS[scored]
        q = case.queries(sum(q_lens))
        actual = paged_prefill(q, case.kv(), prompts_of(q_lens, context_lens, DEVICE), scoring)
        assert_equal(actual, case.expected(q, q_lens, scoring), dtype)

    @pytest.mark.parametrize("window", [0, 3, 100])
    def test_a_prompt_of_several_tiles(self, window: int) -> None:
        """A narrow window leaves rows of a tile that see none of its first keys."""
        from loray.kernels.paged_prefill_triton import paged_prefill

        q_lens, context_lens = [150, 160], [310, 200]
        case, scoring = PagedCase(context_lens, (2, 2, 64), torch.float16, DEVICE), Scoring(0.2, window=window)
        q = case.queries(310)
        actual = paged_prefill(q, case.kv(), prompts_of(q_lens, context_lens, DEVICE), scoring)
        assert_equal(actual, case.expected(q, q_lens, scoring), torch.float16)

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize(("heads", "scored"), COMPILED_FLOAT8, ids=str)
    def test_an_fp8_cache_is_multiplied_by_its_scales(self, heads: tuple[int, int, int], scored: str, dtype: torch.dtype) -> None:
        from loray.kernels.paged_prefill_triton import paged_prefill

        q_lens, context_lens = [20, 30], [30, 105]
        case, scoring = PagedCase(context_lens, heads, dtype, DEVICE), SCORINGS[scored]
        q = case.queries(sum(q_lens))
        actual = paged_prefill(q, case.float8_kv(), prompts_of(q_lens, context_lens, DEVICE), scoring)
        assert_equal(actual, case.expected(q, q_lens, scoring), dtype)
