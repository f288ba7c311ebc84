"""Adapters' matrices go to their pages by one launch: what is written, and nothing beside it.

With TRITON_INTERPRET=1 it runs without a GPU: `TRITON_INTERPRET=1 pytest -m gpu tests/kernels/test_page_scatter.py`.
"""

import pytest
import torch

from loray.models.page_writer import fill_ranks
from tests.kernels.triton_marks import DEVICES, DTYPES, ON_GPU

pytestmark = ON_GPU
DEVICE = DEVICES["triton"]


@pytest.mark.parametrize("num_rows", [0, 5, 8, 20, 24])
def test_one_matrix_goes_where_the_twin_brings_it(num_rows: int) -> None:
    from loray.kernels.page_scatter import scatter_pages

    pools = [torch.full((64, 40), float("nan"), device=DEVICE) for _ in range(2)]
    matrix, runs = torch.randn(num_rows, 40, device="cpu").to(DEVICE), ((8, 16), (32, 48))
    fill_ranks(pools[0], matrix, runs)
    pieces, num_before = [], 0
    for start, end in runs:
        num_there = min(max(num_rows - num_before, 0), end - start)
        pieces.append((pools[1][start].data_ptr(), 40, 40, end - start, 40 * num_before if num_there else 0, num_there))
        num_before += end - start
    scatter_pages(
        torch.cat((matrix.flatten(), torch.zeros(1, device=DEVICE))), torch.tensor(pieces, device=DEVICE), 16, 40, is_aligned=True
    )
    torch.testing.assert_close(pools[1], pools[0], equal_nan=True, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_go_to_their_places_and_zeros_where_there_are_no_more(dtype: torch.dtype) -> None:
    from loray.kernels.page_scatter import scatter_pages

    pools = [torch.full((64, width), float("nan"), dtype=dtype, device=DEVICE) for width in (24, 700)]
    source = torch.randn(6000, device="cpu").to(dtype).to(DEVICE)
    # pool, first row, first column, width, rows, first element, rows there
    wanted = [(0, 8, 3, 5, 8, 10, 3), (0, 24, 0, 24, 16, 100, 16), (1, 0, 0, 700, 8, 1000, 7), (1, 40, 100, 600, 8, 0, 0)]
    expected = [pool.clone() for pool in pools]
    pieces = []
    for pool, row, column, width, rows, first, num_there in wanted:
        target = pools[pool]
        pieces.append((target[row, column:].data_ptr(), target.stride(0), width, rows, first, num_there))
        part = expected[pool][row : row + rows, column : column + width]
        part.zero_()
        part[:num_there] = source[first : first + num_there * width].view(num_there, width)
    scatter_pages(source, torch.tensor(pieces, device=DEVICE), 16, 700, is_aligned=False)
    for found, wanted_pool in zip(pools, expected, strict=True):
        torch.testing.assert_close(found, wanted_pool, equal_nan=True, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_of_whole_words_are_brought_by_the_word(dtype: torch.dtype) -> None:
    """Wider than one program reads, with columns beside them that are nobody's."""
    from loray.kernels.page_scatter import scatter_pages

    pool = torch.full((32, 5016), float("nan"), dtype=dtype, device=DEVICE)
    source = torch.randn(8 + 13 * 5000, device="cpu").to(dtype).to(DEVICE)
    expected = pool.clone()
    expected[8:24, 8:5008] = 0
    expected[8:21, 8:5008] = source[8:].view(13, 5000)
    piece = (pool[8, 8:].data_ptr(), pool.stride(0), 5000, 16, 8, 13)
    scatter_pages(source, torch.tensor([piece], device=DEVICE), 16, 5000, is_aligned=True)
    torch.testing.assert_close(pool, expected, equal_nan=True, rtol=0, atol=0)
