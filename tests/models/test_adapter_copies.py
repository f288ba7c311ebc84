"""A copy of the embedding or the head in an adapter's file is the base model's own but for rounding, or is refused."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from loray.models.adapter import AdapterError
from loray.models.adapter_header import TensorPlace
from loray.models.adapter_tensors import MAX_DISTANCE, _check_copy
from loray.models.parallel import Parallel
from loray.models.vocabulary import Embedding, Head

ROWS, HIDDEN = 50, 64
NAMES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
ROUNDING = {torch.float32: MAX_DISTANCE, torch.float16: 2**-11, torch.bfloat16: 2**-8}
PAIRS = [(copy, base) for copy in NAMES for base in NAMES]


@pytest.fixture
def weight() -> Tensor:
    """As a checkpoint in float32 has it."""
    return torch.randn(ROWS, HIDDEN, generator=torch.Generator().manual_seed(0))


def is_accepted(folder: Path, copy: Tensor, base: Tensor, has_float8_weights: bool = False, rank: int = 0, world_size: int = 1) -> bool:
    parallel = Parallel(rank, world_size)
    layer: Embedding | Head = Head(ROWS, HIDDEN, parallel, None) if has_float8_weights else Embedding(ROWS, HIDDEN, parallel)
    layer.weight.data = base[layer.part.slice].clone()
    if isinstance(layer, Head):
        layer.pack(has_float8_weights)
    data = copy.contiguous().view(torch.uint8).numpy().tobytes()
    (folder / "file").write_bytes(data)
    try:
        _check_copy(folder / "file", TensorPlace(NAMES[copy.dtype], (ROWS, HIDDEN), 0, len(data)), "x", layer)
    except AdapterError:
        return False
    return True


@pytest.mark.parametrize(("copy_dtype", "base_dtype"), PAIRS, ids=str)
def test_a_row_may_be_as_far_as_the_coarser_dtype_rounds(
    tmp_path: Path, weight: Tensor, copy_dtype: torch.dtype, base_dtype: torch.dtype
) -> None:
    weight[17, 0] = 1
    allowed = max(ROUNDING[copy_dtype], ROUNDING[base_dtype]) * weight[17].norm()
    assert is_accepted(tmp_path, weight.to(copy_dtype), weight.to(base_dtype))
    for share, is_near in ((0.8, True), (-0.8, True), (1.3, False), (-1.3, False)):
        copy = weight.clone()
        copy[17, 0] += share * allowed
        assert is_accepted(tmp_path, copy.to(copy_dtype), weight.to(base_dtype)) == is_near


@pytest.mark.parametrize("loaded", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("copy_dtype", "base_dtype"), PAIRS, ids=str)
def test_a_copy_may_be_of_a_model_that_was_loaded_in_half_precision(
    tmp_path: Path, weight: Tensor, copy_dtype: torch.dtype, base_dtype: torch.dtype, loaded: torch.dtype
) -> None:
    assert is_accepted(tmp_path, weight.to(loaded).to(copy_dtype), weight.to(base_dtype))
    assert is_accepted(tmp_path, weight.to(copy_dtype), weight.to(loaded).to(base_dtype)), "or the base model is from such a checkpoint"
    assert not is_accepted(tmp_path, (weight * (1 + 1.3 * 2**-8)).to(loaded).to(copy_dtype), weight.to(base_dtype))


def test_a_copy_in_float32_that_was_never_rounded_is_exact(tmp_path: Path, weight: Tensor) -> None:
    copy = weight.clone()
    copy[3] = copy[3].bfloat16().float()
    assert is_accepted(tmp_path, copy, weight), "this row was rounded"
    copy[3, :2] = weight[3, :2]
    assert not is_accepted(tmp_path, copy, weight), "a part of it was not"


def test_small_numbers_may_be_as_far_as_the_smallest_of_float16(tmp_path: Path, weight: Tensor) -> None:
    weight[:25] *= 1e-6
    for dtype in (torch.float16, torch.float32):
        assert is_accepted(tmp_path, weight.half().to(dtype), weight)
        assert is_accepted(tmp_path, weight.half().to(dtype), weight.bfloat16())
    weight[30] = 0
    assert is_accepted(tmp_path, weight, weight)
    other = weight.clone()
    other[:25] *= 1.2
    assert not is_accepted(tmp_path, other.half(), weight), "further than that"


@pytest.mark.parametrize("row", [3, 40])
def test_each_rank_compares_its_own_rows(tmp_path: Path, weight: Tensor, row: int) -> None:
    copy = weight.clone()
    copy[row] *= 1.03
    assert [is_accepted(tmp_path, copy, weight, rank=rank, world_size=2) for rank in (0, 1)] == [row >= 25, row < 25]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_numbers_that_are_not_finite_are_no_copy(tmp_path: Path, weight: Tensor, value: float) -> None:
    copy = weight.clone()
    copy[2, 3] = value
    assert not is_accepted(tmp_path, copy, weight)


@pytest.mark.parametrize("base_dtype", NAMES, ids=str)
@pytest.mark.parametrize("copy_dtype", NAMES, ids=str)
def test_a_head_in_float8_is_compared_with_what_it_was_before(
    tmp_path: Path, weight: Tensor, copy_dtype: torch.dtype, base_dtype: torch.dtype
) -> None:
    assert is_accepted(tmp_path, weight.to(copy_dtype), weight.to(base_dtype), has_float8_weights=True)
    allowed = max(1e-5, ROUNDING[copy_dtype], ROUNDING[base_dtype])
    copy = weight.clone()
    copy[17] *= 1 + 2.5 * allowed
    assert not is_accepted(tmp_path, copy.to(copy_dtype), weight.to(base_dtype), has_float8_weights=True)
