"""Decode attention against its definition in float64, over awkward sizes, with all memory that nobody may read poisoned.

With TRITON_INTERPRET=1 the GPU's kernels run without a GPU: `TRITON_INTERPRET=1 pytest -m gpu tests/kernels/test_paged_attention.py`.
"""

import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from loray.kernels.attention import Scoring
from loray.kernels.paged_attention import paged_attention
from loray.kernels.paged_kv import PagedKV
from tests.kernels.triton_marks import DEVICES, DTYPES, ON_GPU

DEVICE = DEVICES["triton"]
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}  # of the largest value
BLOCK_SIZE = 16
# query heads, key heads, head_dim
HEADS = [(4, 1, 64), (9, 3, 64), (3, 3, 80), (6, 2, 96), (8, 2, 128), (2, 1, 256), (7, 1, 112), (32, 2, 64), (40, 1, 64), (71, 1, 128)]
SCORINGS = {
    "plain": Scoring(0.1),
    "window": Scoring(0.1, window=21),
    "cap": Scoring(0.5, cap=3.0),
    "both": Scoring(0.3, window=70, cap=5.0),
    "narrow": Scoring(0.3, window=21, cap=5.0),
}
# What a GPU compiles anew: every size of heads with one scoring, one size with every scoring.
COMPILED = [
    *zip(HEADS, ["both", "cap", "window", "both", "plain", "window", "cap", "plain", "both", "cap"], strict=True),
    *((HEADS[4], name) for name in ["window", "cap", "both"]),
]
FLOAT8, FLOAT8_SCALES = torch.float8_e4m3fn, (0.5, 3.0)  # of keys and of values
COMPILED_FLOAT8 = [((8, 2, 128), "plain"), ((7, 1, 64), "narrow"), ((3, 1, 192), "both"), ((2, 1, 256), "window"), ((3, 3, 80), "cap")]


class PagedCase:
    """A cache with random keys and values of some sequences in scattered blocks; what belongs to nobody is NaN, table entries garbage."""

    def __init__(self, context_lens: Sequence[int], heads: tuple[int, int, int], dtype: torch.dtype, device: str = "cpu") -> None:
        num_heads, num_kv_heads, head_dim = heads
        generator = torch.Generator().manual_seed(len(context_lens))
        num_blocks = [math.ceil(context_len / BLOCK_SIZE) for context_len in context_lens]
        total = sum(num_blocks)
        block_ids = torch.randperm(total + 3, generator=generator)[:total]
        cache = torch.full((total + 3, BLOCK_SIZE, 2 * num_kv_heads, head_dim), float("nan"))
        table = torch.full((len(context_lens), max(num_blocks) + 4), 2**30, dtype=torch.int32)
        self.keys, self.values = [], []  # of each sequence, [context_len, num_kv_heads, head_dim] float64
        for seq, (context_len, ids) in enumerate(zip(context_lens, block_ids.split(num_blocks), strict=True)):
            kv = torch.randn(context_len, 2 * num_kv_heads, head_dim, generator=generator).to(dtype)
            table[seq, : len(ids)] = ids
            for place in range(context_len):
                cache[ids[place // BLOCK_SIZE], place % BLOCK_SIZE] = kv[place].float()
            self.keys.append(kv[:, :num_kv_heads].double())
            self.values.append(kv[:, num_kv_heads:].double())
        self.num_heads, self.head_dim, self.generator, self.dtype, self.device = num_heads, head_dim, generator, dtype, device
        self.cache = cache.to(device, dtype)
        self.table = table.to(device)[:, :-1]  # a row's end is not the next one's start
        self.context_lens = torch.tensor(context_lens, dtype=torch.int32, device=device)

    def kv(self, scales: Tensor | None = None) -> PagedKV:
        return PagedKV(self.cache, self.table, self.context_lens, scales)

    def float8_kv(self) -> PagedKV:
        """From now on the keys and values are what a cache in float8 makes of them."""
        self.cache = self.cache.to(FLOAT8)
        self.keys = [keys.to(FLOAT8).double() * FLOAT8_SCALES[0] for keys in self.keys]
        self.values = [values.to(FLOAT8).double() * FLOAT8_SCALES[1] for values in self.values]
        return self.kv(torch.tensor(FLOAT8_SCALES, device=self.device))

    def queries(self, num_tokens: int) -> Tensor:
        """[num_tokens, num_heads, head_dim], a part of rows that are longer."""
        rows = torch.randn(num_tokens, self.num_heads + 3, self.head_dim, generator=self.generator).to(self.device, self.dtype)
        return rows[:, : self.num_heads]

    def expected(self, q: Tensor, q_lens: Sequence[int], scoring: Scoring) -> Tensor:
        """In float64, query by query. Those of a sequence are its last tokens; without keys the result is zero."""
        rows = []
        for queries, keys, values in zip(q.double().cpu().split(list(q_lens)), self.keys, self.values, strict=True):
            for place, query in enumerate(queries, start=len(keys) - len(queries) + 1):
                seen = slice(max(place - scoring.window, 0) if scoring.window else 0, max(place, 0))
                rows.append(torch.stack([self._one(query[head], head, keys[seen], values[seen], scoring) for head in range(len(query))]))
        return torch.stack(rows)

    def _one(self, query: Tensor, head: int, keys: Tensor, values: Tensor, scoring: Scoring) -> Tensor:
        kv_head = head // (self.num_heads // keys.shape[1])
        scores = keys[:, kv_head] @ query * scoring.scale
        if scoring.cap:
            scores = scoring.cap * torch.tanh(scores / scoring.cap)
        return scores.softmax(0) @ values[:, kv_head]


def assert_equal(actual: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    assert actual.dtype == dtype and actual.is_contiguous()
    torch.testing.assert_close(actual.double().cpu(), expected, atol=TOLERANCE[dtype] * float(expected.abs().max()), rtol=0)


@pytest.mark.parametrize(("heads", "scored"), COMPILED, ids=str)
def test_the_twin_weighs_each_sequences_own_keys(heads: tuple[int, int, int], scored: str) -> None:
    case, scoring = PagedCase([1, 0, 17, 90], heads, torch.float32), SCORINGS[scored]
    q = case.queries(4)
    actual = paged_attention(q, case.kv(), scoring)
    assert_equal(actual, case.expected(q, [1] * 4, scoring), torch.float32)


def test_the_twin_multiplies_what_the_cache_holds_by_its_scales() -> None:
    case, scoring = PagedCase([5, 40], (4, 2, 64), torch.float32), Scoring(0.1)
    q, scales = case.queries(2), torch.tensor([0.5, 3.0])
    actual = paged_attention(q, case.kv(scales), scoring)
    case.keys, case.values = [keys * 0.5 for keys in case.keys], [values * 3.0 for values in case.values]
    assert_equal(actual, case.expected(q, [1, 1], scoring), torch.float32)


class TestKernels:
    pytestmark = ON_GPU

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize(("heads", "scored"), COMPILED, ids=str)
    def test_one_program_a_sequence(self, heads: tuple[int, int, int], scored: str, dtype: torch.dtype) -> None:
        from loray.kernels.paged_attention_triton import num_splits, paged_attention

        case, scoring = PagedCase([1, 0, 17, 64, 131], heads, dtype, DEVICE), SCORINGS[scored]
        q = case.queries(5)
        assert num_splits(5, heads[1], case.table.shape[1] * BLOCK_SIZE) == 1
        actual = paged_attention(q, case.kv(), scoring)
        assert_equal(actual, case.expected(q, [1] * 5, scoring), dtype)

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize(("heads", "scored"), COMPILED, ids=str)
    def test_several_programs_share_a_context_and_some_get_nothing(
        self, heads: tuple[int, int, int], scored: str, dtype: torch.dtype
    ) -> None:
        from loray.kernels.paged_attention_triton import num_splits, paged_attention

        case, scoring = PagedCase([1100, 0, 1, 130], heads, dtype, DEVICE), SCORINGS[scored]
        q = case.queries(4)
        assert num_splits(4, heads[1], case.table.shape[1] * BLOCK_SIZE) == 4
        actual = paged_attention(q, case.kv(), scoring)
        assert_equal(actual, case.expected(q, [1] * 4, scoring), dtype)

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize(("heads", "scored"), COMPILED_FLOAT8, ids=str)
    @pytest.mark.parametrize("context_lens", [[3, 0, 80], [1100, 5]], ids=["whole", "shared"])
    def test_an_fp8_cache_is_multiplied_by_its_scales(
        self, context_lens: list[int], heads: tuple[int, int, int], scored: str, dtype: torch.dtype
    ) -> None:
        from loray.kernels.paged_attention_triton import paged_attention

        case, scoring = PagedCase(context_lens, heads, dtype, DEVICE), SCORINGS[scored]
        q = case.queries(len(context_lens))
        actual = paged_attention(q, case.float8_kv(), scoring)
        assert_equal(actual, case.expected(q, [1] * len(context_lens), scoring), dtype)

    @pytest.mark.parametrize("poison", [float("nan"), 1e30], ids=str)
    def test_what_an_output_held_before_does_not_show(self, poison: float, monkeypatch: pytest.MonkeyPatch) -> None:
        from loray.kernels import paged_attention_triton

        empty = torch.empty

        def poisoned(*shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
            return empty(*shape, dtype=dtype, device=device).fill_(poison)

        case, scoring = PagedCase([1100, 0, 1, 130], (6, 2, 96), torch.float32, DEVICE), Scoring(0.1, window=300)
        q = case.queries(4)
        monkeypatch.setattr(paged_attention_triton.torch, "empty", poisoned)
        actual = paged_attention_triton.paged_attention(q, case.kv(), scoring)
        assert_equal(actual, case.expected(q, [1] * 4, scoring), torch.float32)

    def test_splits_fill_the_gpu_and_stop_where_a_share_gets_too_small(self) -> None:
        from loray.kernels.paged_attention_triton import num_splits

        assert num_splits(128, 8, 8192) == num_splits(32, 8, 8192) == 1
        assert num_splits(8, 8, 8192) == 4
        assert num_splits(1, 8, 131072) == 32
        assert num_splits(1, 8, 1024) == 4
        assert num_splits(1, 1, 131072) == 64
