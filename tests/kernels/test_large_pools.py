"""Pools of more than 2**31 elements, as a large GPU has them: what lies at their end is found, and written, there."""

import pytest
import torch

from loray.kernels.attention import Scoring
from loray.kernels.delta import Parted
from loray.kernels.lora import LoraPages, add_lora
from loray.models.lora_groups import lora_segments
from tests.kernels.test_lora_segments import expected_of
from tests.kernels.test_paged_attention import DEVICE, PagedCase, assert_equal
from tests.kernels.test_paged_prefill import prompts_of, starts_of
from tests.kernels.test_varlen_attention import assert_gathered
from tests.kernels.triton_marks import ON_GPU, SLOWLY_INTERPRETED

pytestmark = [*ON_GPU, *SLOWLY_INTERPRETED]
NUM_ELEMENTS = 2**31
HEADS = 2, 1, 64
DTYPE = torch.float16
CONTEXT_LENS = [17, 90]


def far_case() -> PagedCase:
    """Its blocks are the last of a large cache."""
    case = PagedCase(CONTEXT_LENS, HEADS, DTYPE, DEVICE)
    num_before = NUM_ELEMENTS // case.cache[0].numel() + 1
    large = torch.empty(num_before + len(case.cache), *case.cache.shape[1:], dtype=DTYPE, device=DEVICE)
    large[num_before:] = case.cache
    case.cache, case.table = large, case.table + num_before
    return case


def test_new_tokens_see_the_last_blocks_of_a_large_cache() -> None:
    from loray.kernels.paged_attention_triton import paged_attention

    case, scoring = far_case(), Scoring(0.1)
    q = case.queries(2)
    assert_equal(paged_attention(q, case.kv(), scoring), case.expected(q, [1, 1], scoring), DTYPE)


def test_prompts_see_the_last_blocks_of_a_large_cache() -> None:
    from loray.kernels.paged_prefill_triton import paged_prefill

    case, scoring, q_lens = far_case(), Scoring(0.1), [5, 30]
    q = case.queries(sum(q_lens))
    assert_equal(paged_prefill(q, case.kv(), prompts_of(q_lens, CONTEXT_LENS, DEVICE), scoring), case.expected(q, q_lens, scoring), DTYPE)


def test_the_last_blocks_of_a_large_cache_are_gathered() -> None:
    from loray.kernels.prefix_gather_triton import gather_prefix

    case = far_case()
    assert_gathered(case, *gather_prefix(case.cache, case.table, starts_of(CONTEXT_LENS, DEVICE), sum(CONTEXT_LENS)))


def test_keys_and_values_are_stored_in_the_last_blocks_of_a_large_cache() -> None:
    from loray.kernels.rotary_triton import rotate_and_store

    num_heads, num_kv_heads, size = HEADS
    cache = torch.empty(NUM_ELEMENTS // (16 * 2 * size) + 2, 16, 2 * num_kv_heads, size, dtype=DTYPE, device=DEVICE)
    num_slots = len(cache) * 16
    qkv = torch.randn(3, (num_heads + 2 * num_kv_heads) * size).to(DEVICE, DTYPE)
    slots = torch.tensor([num_slots - 1, num_slots - 18, num_slots - 5], device=DEVICE)
    rotate_and_store(Parted(qkv), None, cache, slots, num_heads, None)
    stored = cache.view(num_slots, 2 * num_kv_heads * size)[slots]
    assert torch.equal(stored, qkv[:, num_heads * size :])


@pytest.mark.parametrize("is_long", [False, True], ids=["few tokens", "many"])
@pytest.mark.parametrize("num_projections", [1, 3])
def test_an_adapter_in_the_last_pages_of_a_large_pool_is_added(num_projections: int, is_long: bool) -> None:
    """Of three projections only the last lies beyond 2**31."""
    inputs, widths = 64, [64, 32, 32][:num_projections]
    num_ranks = NUM_ELEMENTS // inputs // max(num_projections - 1, 1) + 48
    a = torch.empty(num_projections, num_ranks, inputs, dtype=DTYPE, device=DEVICE)
    b = torch.empty(num_ranks, sum(widths), dtype=DTYPE, device=DEVICE)
    last = slice(num_ranks - 24, num_ranks)
    a[:, last], b[last] = torch.randn(num_projections, 24, inputs).to(DEVICE, DTYPE), torch.randn(24, sum(widths)).to(DEVICE, DTYPE)
    num_tokens = 70 if is_long else 2
    x, y = torch.randn(num_tokens, inputs).to(DEVICE, DTYPE), torch.zeros(num_tokens, sum(widths), device=DEVICE, dtype=DTYPE)
    segments = lora_segments([((last.start, last.stop),)], [num_tokens], lambda array: torch.from_numpy(array).to(DEVICE))
    expected = expected_of(y, x, LoraPages(a[:, last], b[last], widths), [(num_tokens, ((0, 24),))])
    add_lora(y, x, LoraPages(a, b, widths), segments)
    torch.testing.assert_close(y.double().cpu(), expected, atol=5e-3 * float(expected.abs().max()), rtol=0)
