"""What a GPU must have, and what happens where memory is short."""

import logging
import mmap
import resource
from pathlib import Path

import pytest
import torch

from loray.models import runner as runner_module
from loray.models.device_memory import claimed
from loray.models.device_support import UnsupportedDevice, check_gpu
from loray.models.parallel import Parallel
from loray.models.runner import Runner

TOO_MANY_BYTES = 1 << 48  # more than a process can address
NO_FLOAT8 = (False, False)  # neither the cache nor the weights


@pytest.mark.parametrize(
    ("capability", "head_dim", "float8", "words"),
    [
        ((7, 5), 64, NO_FLOAT8, r"Card has compute capability 7\.5; loray needs 8\.0 \(A100\) or newer"),
        ((8, 0), 64, (True, False), r"kv_cache\.dtype: fp8 needs compute capability 8\.9 .* Card has 8\.0: use auto"),
        ((8, 6), 64, (False, True), r"model\.quantization: fp8 needs compute capability 8\.9 .* Card has 8\.6: leave it out"),
        ((9, 0), 512, NO_FLOAT8, "heads of 512; on a GPU loray attends heads of up to 256"),
    ],
)
def test_what_a_gpu_lacks_is_named(capability: tuple[int, int], head_dim: int, float8: tuple[bool, bool], words: str) -> None:
    with pytest.raises(UnsupportedDevice, match=words):
        check_gpu("Card", capability, head_dim, *float8)


@pytest.mark.parametrize(("capability", "has_float8"), [((8, 0), False), ((8, 9), True), ((9, 0), True), ((10, 0), True)])
def test_others_are_taken(capability: tuple[int, int], has_float8: bool) -> None:
    check_gpu("Card", capability, 256, has_float8, has_float8)


def test_where_the_blocks_do_not_fit_there_are_fewer_and_the_log_says_so(
    base: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner_module, "FEWER_BLOCKS", 1e-6)  # from that many on, nine tenths would take a hundred attempts
    runner = Runner(base, Parallel(), torch.device("cpu"), torch.float32, 4, 128)
    too_many = TOO_MANY_BYTES // runner.report(0.5).block_bytes
    with caplog.at_level(logging.WARNING, "loray.runner"):
        num_blocks = runner.allocate(too_many, 8)
    assert 0 < num_blocks < too_many
    assert runner._kv_cache is not None and len(runner._kv_cache.layers[0].blocks) == num_blocks
    assert f"out of memory with {too_many} KV blocks: trying" in caplog.records[0].getMessage()
    assert str(num_blocks) in caplog.records[-1].getMessage()


def test_a_pool_takes_its_memory_at_once() -> None:
    """Else a server grows for hours, until every block was used once."""
    pool = torch.frombuffer(mmap.mmap(-1, 64 << 20), dtype=torch.uint8)
    before = resident_bytes()
    claimed(pool)
    assert resident_bytes() - before > 0.9 * pool.nbytes


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
