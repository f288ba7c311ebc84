"""add_lora against its definition in float64, over awkward sizes and mixes of adapters."""

import pytest
import torch

from loray.kernels.lora import MAX_KEPT_RUNS, LoraPages, add_lora
from loray.models.batch import LoraSegment

MIXES = {
    "one": [LoraSegment(13, ((0, 8),))],
    "all_different": [LoraSegment(1, ((8 * i, 8 * i + 8),)) for i in range(5)],
    "skewed": [LoraSegment(30, ((16, 40),)), LoraSegment(1, ((0, 8),)), LoraSegment(2, ())],
    "scattered": [LoraSegment(3, ((0, 8), (24, 32), (40, 48))), LoraSegment(4, ()), LoraSegment(1, ((8, 24),))],
    "none": [LoraSegment(6, ())],
}


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize(("inputs", "widths"), [(17, [5]), (48, [48, 16, 16]), (33, [75, 75])])
def test_each_segment_gets_the_product_of_its_own_ranks(mix: str, inputs: int, widths: list[int]) -> None:
    segments = MIXES[mix]
    num_tokens = sum(segment.num_tokens for segment in segments)
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(num_tokens, inputs, generator=generator), torch.randn(num_tokens, sum(widths), generator=generator)
    a, b = torch.randn(len(widths), 48, inputs, generator=generator), torch.randn(48, sum(widths), generator=generator)
    expected, token = y.double(), 0
    for segment in segments:
        for _ in range(segment.num_tokens):
            for rank in (rank for run in segment.runs for rank in range(*run)):
                shrunk = [float(x[token].double() @ a[i, rank].double()) for i in range(len(widths))]
                expected[token] += torch.cat([s * part for s, part in zip(shrunk, b[rank].double().split(widths), strict=True)])
            token += 1
    add_lora(y, x, LoraPages(a, b, widths), segments)
    torch.testing.assert_close(y.double(), expected, atol=1e-4, rtol=1e-4)


def test_kept_views_see_what_is_loaded_later_and_stay_few() -> None:
    pages = LoraPages(torch.zeros(1, 8 * 300, 4), torch.zeros(8 * 300, 3), [3])
    x, y, segments = torch.ones(1, 4), torch.zeros(1, 3), [LoraSegment(1, ((8, 16),))]
    add_lora(y, x, pages, segments)
    pages.a[0, 8], pages.b[8] = 1.0, 2.0
    add_lora(y, x, pages, segments)
    assert y.tolist() == [[8.0, 8.0, 8.0]]
    for page in range(300):
        pages.run((8 * page, 8 * page + 8))
    assert len(pages._runs) <= MAX_KEPT_RUNS
