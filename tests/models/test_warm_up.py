"""What is run before the first request: every kind of step that is launched kernel by kernel, and the largest."""

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from loray.kernels.lora import LoraPages, LoraSegments
from loray.models import linear, lora_groups
from loray.models import runner as runner_module
from loray.models.runner_sizes import RunnerSizes
from loray.models.step import Admission, Row, Sampling
from loray.models.warm_up import StepLimits, warm_up_steps
from tests.kernels.triton_marks import DEVICES, ON_GPU
from tests.models.conductor import Conductor

LONG = 700  # tokens, more than a graph has
# Pages of the adapters that decode, and beside them a prompt: its tokens and its adapter's pages.
MIXES: list[tuple[list[list[int]], int, list[int]]] = [
    ([], LONG, [3]),
    ([], LONG, [3, 4, 7]),
    ([[3]], LONG, []),
    ([[3, 4]], LONG, []),
    ([[3, 4, 7]], LONG, []),
    ([[], [3], [4, 5, 6, 7]], LONG, [8, 9]),
    ([[3], [5, 6, 8]], 9, [7]),
    ([[], [3], [3]], 40, [4, 5, 6]),
]


def serve(conductor: Conductor, decodes: list[list[int]], num_prompt: int, page_ids: list[int]) -> None:
    def blocks(slot: int, count: int) -> list[int]:
        return conductor.blocks(slot, 0, count)

    slots = range(len(decodes))
    admissions = [Admission(slot, [1, 2], [], 0, pages, Sampling()) for slot, pages in enumerate(decodes)]
    conductor.step([Row(slot, 2, blocks(slot, 3), True) for slot in slots], admissions)
    last = len(decodes)
    rows = [*(Row(slot, 1, [], True) for slot in slots), Row(last, num_prompt, blocks(last, num_prompt), True)]
    conductor.step(rows, [Admission(last, [1] * num_prompt, [], 0, page_ids, Sampling())])


def test_mixes_of_adapters_bring_no_kind_of_blocks_that_was_not_there_at_the_start(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = set()

    def note(*arguments: object) -> None:
        segments = arguments[-1]
        assert isinstance(segments, LoraSegments)
        seen.add((segments.block_tokens, segments.max_pages * segments.page_rank > 16))

    def note_gate(act: Callable[[Tensor], Tensor], y: Tensor, x: Tensor, pages: LoraPages, work: LoraSegments) -> Tensor:
        note(work)
        return y.chunk(2, 1)[0]

    monkeypatch.setattr(linear, "add_lora", note)
    monkeypatch.setattr(linear, "gate_updated", note_gate)
    for module in (runner_module, lora_groups):
        monkeypatch.setattr(module, "uses_triton", lambda device: True)
    conductor = Conductor(base, max_total_tokens=1024)
    before = set(seen)
    assert len(before) == 4  # short blocks and long ones, few ranks and many
    for mix in MIXES:
        serve(conductor, *mix)
    assert seen == before


class Launches:
    """Stands for a kernel: notes what Triton would compile, and computes nothing."""

    def __init__(self, kernel: Any, seen: set[tuple[object, ...]]) -> None:
        kept = kernel.kwargs if hasattr(kernel, "kwargs") else vars(kernel)
        self._names = list(inspect.signature(kernel.fn).parameters)
        self._plain = set(kept["do_not_specialize"] or ())
        self._seen = seen

    def __getitem__(self, grid: object) -> Callable[..., None]:
        return self._note

    def _note(self, *arguments: object, **options: object) -> None:
        named = zip(self._names, arguments, strict=False)
        kinds = tuple("any" if name in self._plain else kind(value) for name, value in named)
        self._seen.add((self._names[0], len(self._names), kinds, tuple(sorted(options.items()))))


def kind(value: object) -> object:
    """Triton makes other code for 1 and for what 16 divides, and for pointers likewise."""
    if isinstance(value, Tensor):
        return value.dtype, value.data_ptr() % 16 == 0
    assert isinstance(value, int)
    return 1 if value == 1 else (value % 16 == 0, value >= 1 << 31)


@pytest.mark.parametrize("backend", [pytest.param("triton", marks=ON_GPU)])
def test_mixes_of_adapters_bring_no_kernel_that_was_not_compiled_at_the_start(
    base: Path, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from loray.kernels import lora_gate_triton, lora_segments

    seen: set[tuple[object, ...]] = set()
    for module, name in (
        (lora_segments, "_shrink_kernel"),
        (lora_segments, "_expand_kernel"),
        (lora_gate_triton, "_gate_updated_kernel"),
    ):
        monkeypatch.setattr(module, name, Launches(getattr(module, name), seen))
    conductor = Conductor(base, device=DEVICES[backend], max_total_tokens=1024)
    before = set(seen)
    assert before
    for mix in MIXES:
        serve(conductor, *mix)
    assert seen == before


@pytest.mark.parametrize(
    ("max_total_tokens", "max_batch_tokens", "num_blocks", "expected"),
    [
        (4096, 2048, 1000, [(256, 4096)] * 8),
        (100, 2048, 1000, [(100, 100)] * 8),  # as many as may run
        (100, 300, 1000, [(37, 85)] * 8),  # whole blocks lie before
        (4096, 2048, 10, [(160, 160)] * 8),  # they share what they have
        (4096, 5, 1000, [(1, 4081)] * 5),
        (20000, 2048, 10000, [(1024, 20000), (1024, 12768)]),  # one that is whole, and a part of another
        (131072, 2048, 10000, [(1024, 131072), (1024, 2048)]),
    ],
)
def test_the_last_step_has_the_most_tokens_over_the_longest_sequences(
    max_total_tokens: int, max_batch_tokens: int, num_blocks: int, expected: list[tuple[int, int]]
) -> None:
    *_, step = warm_up_steps(StepLimits(RunnerSizes(8, max_total_tokens, 16, max_batch_tokens), num_blocks, num_pages=2))
    assert [(row.num_tokens, len(a.token_ids)) for row, a in zip(step.rows, step.admissions, strict=True)] == expected
    held = [block for row, a in zip(step.rows, step.admissions, strict=True) for block in (*a.block_ids, *row.new_block_ids)]
    assert len(set(held)) <= num_blocks


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        (RunnerSizes(256, 1024, 16, 512), (33, 2, 1010)),
        (RunnerSizes(256, 4096, 16, 64), (9, 2, 4082)),
        (RunnerSizes(130, 256, 16, 2048), (130, 13, 253)),  # with fewer new tokens, fewer lie before
        (RunnerSizes(128, 256, 16, 2048), None),
        (RunnerSizes(256, 1024, 16, 65), None),
        (RunnerSizes(8, 1, 16, 8), None),
    ],
)
def test_a_step_has_just_more_keys_of_prompts_than_are_copied_wherever_one_may(
    sizes: RunnerSizes, expected: tuple[int, int, int] | None
) -> None:
    found = None
    for step in warm_up_steps(StepLimits(sizes, num_blocks=1000, num_pages=0)):
        lengths = {len(admission.token_ids) for admission in step.admissions}
        if sum(len(admission.token_ids) for admission in step.admissions) > sizes.most_copied_keys:
            [num_new], [length] = {row.num_tokens for row in step.rows}, lengths
            found = len(step.rows), num_new, length
    assert found == expected


@pytest.mark.parametrize(
    ("sizes", "num_blocks", "num_pages"),
    [(RunnerSizes(1, 2, 16, 1), 1, 0), (RunnerSizes(1, 40, 16, 8), 1, 1), (RunnerSizes(3, 600, 16, 700), 90, 4)],
)
def test_no_step_goes_beyond_the_limits(sizes: RunnerSizes, num_blocks: int, num_pages: int) -> None:
    num_tokens = dict.fromkeys(range(sizes.max_running), 0)
    for step in warm_up_steps(StepLimits(sizes, num_blocks, num_pages)):
        num_tokens.update({admission.slot: len(admission.token_ids) for admission in step.admissions})
        for admission in step.admissions:
            assert max(admission.page_ids, default=-1) < num_pages
        for row in step.rows:
            assert max(row.new_block_ids, default=-1) < num_blocks
            assert num_tokens[row.slot] <= sizes.max_total_tokens
        assert len(step.rows) <= sizes.max_running and sum(row.num_tokens for row in step.rows) <= sizes.max_batch_tokens
