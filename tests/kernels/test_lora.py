"""add_lora against its definition in float64, over awkward sizes and mixes of adapters."""

import pytest
import torch

from loray.kernels.lora import MAX_KEPT_VIEWS, LoraGroup, LoraPages, PoolView, add_lora
from loray.models.lora_groups import Run, lora_groups

Rows = list[tuple[int, tuple[Run, ...]]]  # tokens and runs of each row

MIXES: dict[str, Rows] = {
    "one": [(13, ((0, 8),))],
    "all different": [(1, ((8 * i, 8 * i + 8),)) for i in range(5)],
    "equal distances with a gap": [(2, ((0, 8),)), (2, ((16, 24),)), (2, ((32, 40),))],
    "unequal counts": [(1, ((0, 8),)), (3, ((8, 16),)), (2, ((16, 24),))],
    "unequal sizes, one after another": [(2, ((0, 8),)), (2, ((8, 24),)), (2, ((24, 48),))],
    "unequal sizes and counts": [(1, ((8, 16),)), (2, ((16, 40),)), (1, ((40, 48),))],
    "unequal distances": [(1, ((0, 8),)), (1, ((8, 16),)), (1, ((32, 40),))],
    "skewed": [(2, ()), (30, ((16, 40),)), (1, ((0, 8),))],
    "skewed, equally large": [(30, ((0, 8),)), (1, ((8, 16),)), (1, ((16, 24),))],
    "scattered": [(3, ((0, 8), (24, 32), (40, 48))), (4, ()), (1, ((8, 24),))],
    "decodes, then prefills of the same": [(1, ((0, 8),)), (1, ((8, 16),)), (4, ((0, 8),)), (9, ((8, 16),))],
    "none": [(6, ())],
}


def groups_of(rows: Rows) -> tuple[LoraGroup, ...]:
    return tuple(lora_groups([runs for _, runs in rows], [count for count, _ in rows], torch.from_numpy))


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize(("inputs", "widths"), [(17, [5]), (48, [48, 16, 16]), (33, [75, 75])])
def test_each_token_gets_the_product_of_its_own_ranks(mix: str, inputs: int, widths: list[int]) -> None:
    rows = MIXES[mix]
    num_tokens = sum(count for count, _ in rows)
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(num_tokens, inputs, generator=generator), torch.randn(num_tokens, sum(widths), generator=generator)
    a, b = torch.randn(len(widths), 48, inputs, generator=generator), torch.randn(48, sum(widths), generator=generator)
    expected, token = y.double(), 0
    for count, runs in rows:
        for _ in range(count):
            for rank in (rank for run in runs for rank in range(*run)):
                shrunk = [float(x[token].double() @ a[i, rank].double()) for i in range(len(widths))]
                expected[token] += torch.cat([s * part for s, part in zip(shrunk, b[rank].double().split(widths), strict=True)])
            token += 1
    add_lora(y, x, LoraPages(a, b, widths), groups_of(rows))
    torch.testing.assert_close(y.double(), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("mix", "views"),
    [
        ("all different", [PoolView(0, 8, 8, 5)]),
        ("equal distances with a gap", [PoolView(0, 8, 16, 3)]),
        ("unequal counts", [PoolView(0, 8, 8, 3)]),
        ("unequal sizes, one after another", [PoolView(0, 8, 8, 6)]),
        ("unequal sizes and counts", [PoolView(8, 8, 8, 5)]),
        ("unequal distances", [PoolView(0, 8, 8, 2), PoolView(32, 8, 8, 1)]),
        ("skewed, equally large", [PoolView(0, 8, 8, 1), PoolView(8, 8, 8, 2)]),
        ("none", []),
    ],
)
def test_adapters_share_a_product_where_their_ranks_lie_at_equal_distances(mix: str, views: list[PoolView]) -> None:
    assert [group.view for group in groups_of(MIXES[mix])] == views


def test_a_rank_without_inputs_adds_nothing() -> None:
    """A layer with fewer inputs than ranks leaves some ranks none."""
    rows: Rows = [(1, ((0, 8),)), (3, ((8, 16),))]
    y = torch.ones(4, 3)
    add_lora(y, torch.empty(4, 0), LoraPages(torch.empty(1, 48, 0), torch.ones(48, 3), [3]), groups_of(rows))
    assert y.eq(1).all()


def test_kept_views_see_what_is_loaded_later_and_stay_few() -> None:
    pages = LoraPages(torch.zeros(1, 8 * 300, 4), torch.zeros(8 * 300, 3), [3])
    x, y, groups = torch.ones(1, 4), torch.zeros(1, 3), groups_of([(1, ((8, 16),))])
    add_lora(y, x, pages, groups)
    pages.a[0, 8], pages.b[8] = 1.0, 2.0
    add_lora(y, x, pages, groups)
    assert y.tolist() == [[8.0, 8.0, 8.0]]
    for page in range(300):
        pages.matrices(PoolView(8 * page, 8, 8, 1))
    assert len(pages._views) <= MAX_KEPT_VIEWS
