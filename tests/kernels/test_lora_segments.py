"""The GPU's LoRA kernels against their definition in float64, over awkward sizes and mixes of adapters.

With TRITON_INTERPRET=1 they run without a GPU: `TRITON_INTERPRET=1 pytest -m gpu tests/kernels/test_lora_segments.py`.
"""

import random
from dataclasses import replace

import pytest
import torch

from loray.kernels.lora import LoraPages, add_lora
from loray.models.lora_groups import lora_segments
from tests.kernels.test_lora import MIXES, Rows
from tests.kernels.triton_marks import DEVICES, DTYPES, ON_GPU, SLOWLY_INTERPRETED, framed, is_whole

pytestmark = ON_GPU
DEVICE = DEVICES["triton"]
NUM_RANKS = 272
LONG: dict[str, Rows] = {
    "a prompt of several blocks": [(1, ((0, 8),)), (150, ((8, 48),)), (3, ())],
    "prompts among the base model's": [(70, ()), (65, ((0, 16), (24, 32))), (1, ()), (64, ((40, 48),))],
}
LARGE: dict[str, Rows] = {  # adapters of ranks 64 and 256
    "new tokens": [(2, ((0, 64),)), (1, ()), (1, ((16, 272),))],
    "a prompt": [(20, ((16, 272),))],
}
TOLERANCE = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 4e-2}  # of the largest value


def expected_of(y: torch.Tensor, x: torch.Tensor, pages: LoraPages, rows: Rows) -> torch.Tensor:
    """In float64. Written out for each token: y += (x a^T) b."""
    y, x, a, b = (tensor.double().cpu() for tensor in (y, x, pages.a, pages.b))
    token = 0
    for count, runs in rows:
        ranks = [rank for run in runs for rank in range(*run)]
        part = slice(token, token + count)
        y[part] += torch.cat([x[part] @ a[i, ranks].T @ b_part for i, b_part in enumerate(b[ranks].split(pages.widths, 1))], 1)
        token += count
    return y


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("mix", [*MIXES, *LONG])
@pytest.mark.parametrize(("inputs", "widths"), [(17, [5]), (48, [48, 16, 16]), (320, [130, 257]), (2500, [20])])
def test_each_token_gets_the_product_of_its_own_ranks(mix: str, inputs: int, widths: list[int], dtype: torch.dtype) -> None:
    rows = (MIXES | LONG | LARGE)[mix]
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(DEVICE, dtype)

    num_tokens = sum(count for count, _ in rows)
    x, y = normal(num_tokens, inputs), normal(num_tokens, sum(widths))
    pages = LoraPages(normal(len(widths), NUM_RANKS, inputs), normal(NUM_RANKS, sum(widths)), widths)
    expected = expected_of(y, x, pages, rows)
    if any(runs for _, runs in rows):
        segments = lora_segments([runs for _, runs in rows], [count for count, _ in rows], lambda array: torch.from_numpy(array).to(DEVICE))
        add_lora(y, x, pages, segments)
    torch.testing.assert_close(y.double().cpu(), expected, atol=TOLERANCE[dtype] * float(expected.abs().max()), rtol=0)


def random_rows(rng: random.Random, counts: tuple[int, ...] = (1, 1, 1, 5, 40)) -> Rows:
    """New tokens and prompts of the base model and of adapters whose pages lie anywhere in the pool. counts: tokens of a row."""
    pages = rng.sample(range(NUM_RANKS // 8), NUM_RANKS // 8)
    adapters: list[tuple[tuple[int, int], ...]] = [()]
    while len(adapters) < 7:
        adapters.append(tuple((8 * page, 8 * page + 8) for page in sorted(pages.pop() for _ in range(rng.randint(1, 4)))))
    return [(rng.choice(counts), rng.choice(adapters)) for _ in range(rng.randint(2, 24))]


@pytest.mark.parametrize("seed", range(8))
def test_any_mix_of_adapters_in_rows_that_lie_apart(seed: int) -> None:
    rng = random.Random(seed)
    rows, inputs, widths = random_rows(rng), rng.choice((17, 96, 320)), rng.choice(([5], [48, 16, 16], [130, 257]))
    num_tokens = sum(count for count, _ in rows)
    generator = torch.Generator().manual_seed(seed)
    a, b = (torch.randn(*shape, generator=generator).to(DEVICE) for shape in ((len(widths), NUM_RANKS, inputs), (NUM_RANKS, sum(widths))))
    (_, x), (frame, y) = (framed(torch.randn(num_tokens, size, generator=generator), DEVICE) for size in (inputs, sum(widths)))
    expected = expected_of(y, x, LoraPages(a, b, widths), rows)
    segments = lora_segments([runs for _, runs in rows], [count for count, _ in rows], lambda array: torch.from_numpy(array).to(DEVICE))
    add_lora(y, x, LoraPages(a, b, widths), segments)
    torch.testing.assert_close(y.double().cpu(), expected, atol=1e-4 * float(expected.abs().max()), rtol=0)
    assert is_whole(frame)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("inputs", "widths", "num_splits"),
    [
        (17, [5], 1),
        (2500, [130, 257], 2),
        *(pytest.param(*sizes, marks=SLOWLY_INTERPRETED) for sizes in ((4096, [48, 16, 16], 4), (14336, [20], 8))),
    ],
)
@pytest.mark.parametrize("seed", range(4))
def test_updates_of_any_mix_of_new_tokens_have_all_inputs(
    seed: int, inputs: int, widths: list[int], num_splits: int, dtype: torch.dtype
) -> None:
    from loray.kernels import lora_segments as kernels

    rows = random_rows(random.Random(seed), counts=(1, 1, 2))
    generator = torch.Generator().manual_seed(seed)
    shapes = (sum(count for count, _ in rows), inputs), (len(widths), NUM_RANKS, inputs), (NUM_RANKS, sum(widths))
    x, a, b = (torch.randn(*shape, generator=generator).to(DEVICE, dtype) for shape in shapes)
    pages = LoraPages(a, b, widths)
    segments = lora_segments([runs for _, runs in rows], [count for count, _ in rows], lambda array: torch.from_numpy(array).to(DEVICE))
    assert len(kernels.shrink(x, a, segments)) == num_splits
    found, is_updated = kernels.lora_update(x, pages, segments).double().cpu(), segments.is_updated.bool().cpu()
    expected = expected_of(torch.zeros(len(x), sum(widths)), x, pages, rows)
    assert is_updated.tolist() == [bool(runs) for count, runs in rows for _ in range(count)]
    torch.testing.assert_close(found[is_updated], expected[is_updated], atol=TOLERANCE[dtype] * float(expected.abs().max()), rtol=0)


@pytest.mark.parametrize("mix", LONG)
def test_a_prompt_gets_all_columns_of_wide_projections(mix: str) -> None:
    test_each_token_gets_the_product_of_its_own_ranks(mix, 48, [1300, 257, 513], torch.float16)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("mix", "inputs"), [("new tokens", 4096), pytest.param("new tokens", 14336, marks=SLOWLY_INTERPRETED), ("a prompt", 320)]
)
def test_all_inputs_and_ranks_of_large_layers_and_adapters_are_summed(mix: str, inputs: int, dtype: torch.dtype) -> None:
    test_each_token_gets_the_product_of_its_own_ranks(mix, inputs, [20, 30], dtype)


def test_pages_of_nobody_are_never_read() -> None:
    """What an evicted adapter or nobody has left in the pool may be anything."""
    pages = LoraPages(torch.full((1, 48, 32), float("nan"), device=DEVICE), torch.full((48, 20), float("nan"), device=DEVICE), [20])
    pages.a[:, 8:16], pages.b[8:16] = 1.0, 1.0
    x, y = torch.ones(3, 32, device=DEVICE), torch.zeros(3, 20, device=DEVICE)
    segments = lora_segments([(), ((8, 16),)], [2, 1], lambda array: torch.from_numpy(array).to(DEVICE))
    add_lora(y, x, pages, segments)
    assert y[:2].eq(0).all() and y[2].eq(8 * 32).all()


def test_what_is_still_to_be_added_is_written_for_the_tokens_of_adapters_alone() -> None:
    from loray.kernels import lora_segments as kernels

    rows: Rows = [(2, ()), (1, ((8, 16),)), (3, ((16, 48),)), (1, ())]
    x = torch.randn(7, 40).to(DEVICE)
    pages = LoraPages(torch.randn(2, NUM_RANKS, 40).to(DEVICE), torch.randn(NUM_RANKS, 300).to(DEVICE), [30, 270])
    segments = lora_segments([runs for _, runs in rows], [count for count, _ in rows], lambda array: torch.from_numpy(array).to(DEVICE))
    blocks = torch.cat((segments.blocks, torch.zeros_like(segments.blocks)))  # some that stand for nothing, as in a padded batch
    segments = replace(segments, blocks=blocks, max_pages=8)
    found = torch.full((7, 300), float("nan"), device=DEVICE)  # of an update that is written, nothing is read
    kernels._expand(found, kernels.shrink(x, pages.a, segments), pages, segments, is_added=False)
    assert torch.equal(kernels.lora_update(x, pages, segments)[2:6], found[2:6]) and found[[0, 1, 6]].isnan().all()
    expected = expected_of(torch.zeros(7, 300), x, pages, rows)
    assert segments.is_updated.tolist() == [0, 0, 1, 1, 1, 1, 0]
    torch.testing.assert_close(found[2:6].double().cpu(), expected[2:6], atol=1e-3, rtol=0)
