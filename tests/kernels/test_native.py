"""What native.c does for a CPU, against its definition in float64 or its twin. Norms, gates and positions are tested beside their twins."""

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from loray.kernels import native
from loray.kernels.attention import Scoring
from loray.kernels.lora import LoraPages, add_lora
from loray.kernels.paged_attention import paged_attention
from loray.kernels.paged_kv import PagedKV
from loray.models.lora_groups import lora_segments
from tests.kernels.test_lora import MIXES, Rows
from tests.kernels.test_lora_segments import LONG, NUM_RANKS, expected_of
from tests.kernels.triton_marks import framed, is_whole

BACKEND = pytest.mark.parametrize("backend", ["native"])


@BACKEND
@pytest.mark.parametrize("mix", [*MIXES, *LONG])
@pytest.mark.parametrize(("inputs", "widths"), [(17, [5]), (48, [48, 16, 16]), (320, [130, 557]), (2500, [20])])
def test_each_token_gets_the_product_of_its_own_ranks(backend: str, mix: str, inputs: int, widths: list[int]) -> None:
    rows = (MIXES | LONG)[mix]
    num_tokens = sum(count for count, _ in rows)
    _, x = framed(torch.randn(num_tokens, inputs), "cpu")
    frame, y = framed(torch.randn(num_tokens, sum(widths)), "cpu")
    pages = LoraPages(torch.randn(len(widths), NUM_RANKS, inputs), torch.randn(NUM_RANKS, sum(widths)), widths)
    expected = expected_of(y, x, pages, rows)
    if any(runs for _, runs in rows):
        add_lora(y, x, pages, lora_segments([runs for _, runs in rows], [count for count, _ in rows], torch.from_numpy))
    torch.testing.assert_close(y.double(), expected, atol=1e-5 * float(expected.abs().max()), rtol=0)
    assert is_whole(frame)


@pytest.fixture
def two_threads() -> Iterator[None]:
    """Of OpenMP, however many `make check` allows."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(num_threads)


@BACKEND
def test_no_thread_reads_what_another_has_not_shrunk_yet(backend: str, two_threads: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of them has all the long block to shrink: it takes longer than the system takes to start the other, even on the same core."""
    monkeypatch.setattr(native, "_empty", lambda *shape: torch.full(shape, float("nan")))  # else the last call's numbers may be there
    rows: Rows = [(1, ((0, 8),)), (64, ((8, 24),))]
    inputs, columns = 16384, 1200
    x = torch.randn(65, inputs)
    pages = LoraPages(torch.randn(1, NUM_RANKS, inputs), torch.randn(NUM_RANKS, columns), [columns])
    segments = lora_segments([runs for _, runs in rows], [count for count, _ in rows], torch.from_numpy)
    expected = expected_of(torch.zeros(65, columns), x, pages, rows)
    for _ in range(5):
        y = torch.zeros(65, columns)
        add_lora(y, x, pages, segments)
        torch.testing.assert_close(y.double(), expected, atol=1e-5 * float(expected.abs().max()), rtol=0)


@BACKEND
@pytest.mark.parametrize("lens", [[1], [5, 0, 33, 16], [700] * 9, [1, 2, 3, 4, 5]], ids=str)
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim"), [(9, 3, 64), (1, 1, 5), (8, 8, 80), (12, 1, 256), (20, 2, 128), (4, 2, 192)]
)
@pytest.mark.parametrize("scoring", [Scoring(0.125), Scoring(0.3, window=7), Scoring(1.0, window=600, cap=5.0)], ids=str)
def test_a_query_weighs_the_keys_of_its_own_sequence(
    backend: str, lens: list[int], num_heads: int, num_kv_heads: int, head_dim: int, scoring: Scoring
) -> None:
    num_blocks = -(-max(lens) // 16)
    table = torch.randperm(len(lens) * num_blocks, dtype=torch.int32).view(len(lens), -1)
    cache = torch.randn(len(lens) * num_blocks, 16, 2 * num_kv_heads, head_dim)
    kv = PagedKV(cache, table, torch.tensor(lens, dtype=torch.int32))
    q = torch.randn(len(lens), num_heads + 2, head_dim)[:, 1:-1]
    found = paged_attention(q, kv, scoring)
    library, native._library = native._library, None
    expected = paged_attention(q, kv, scoring)
    native._library = library
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=0)


@BACKEND
def test_nan_shows(backend: str) -> None:
    """An overflow must not become a token."""
    x = torch.randn(2, 32)
    x[1, 3] = float("nan")
    assert native.rms_norm(x, torch.ones(32), 1e-5).isnan().any(1).tolist() == [False, True]
    assert native.silu_gate(x).isnan().any(1).tolist() == [False, True]
    kv = PagedKV(torch.full((1, 16, 2, 32), float("nan")), torch.zeros(1, 1, dtype=torch.int32), torch.ones(1, dtype=torch.int32))
    assert native.paged_attention(x[:1, None], kv, Scoring(1.0)).isnan().all()


@BACKEND
def test_without_a_compiler_the_twins_do_the_work_and_the_log_says_so(
    backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(native, "_library", None)
    for compiler, reason in (("no-such-compiler", "no-such-compiler"), ("false", "non-zero")):
        monkeypatch.setenv("CC", compiler)
        with caplog.at_level(logging.WARNING):
            native.prepare(tmp_path)
        assert not native.serves(torch.device("cpu"), torch.float32) and reason in caplog.messages[-1]
    assert not list(tmp_path.iterdir())
