"""Memory for adapters goes back to the machine, whatever else lives on beside it; on a GPU, pinned memory too."""

import subprocess
import sys
import time
from collections.abc import Callable

import psutil
import pytest
import torch

from loray.models.host_memory import MIN_MAPPED_BYTES, host_tensor, register
from tests.kernels.triton_marks import REAL_GPU

MIB = 1 << 20
NUM = 24
DROP_AND_END = """
import torch
from loray.models.host_memory import host_tensor
values = [host_tensor(1 << 20, torch.float32, is_pinned=True) for _ in range(200)]
copies = [one.to("cuda", non_blocking=True) for one in values]
del values
"""
IS_PINNED = [False, pytest.param(True, marks=REAL_GPU)]


def resident_bytes() -> int:
    return int(psutil.Process().memory_info().rss)


def filled(num_bytes: int, is_pinned: bool = False) -> torch.Tensor:
    return host_tensor(num_bytes // 4, torch.float32, is_pinned).fill_(1.0)


def wait_until(claim: Callable[[], bool], seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not claim():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.01)


@pytest.mark.parametrize("is_pinned", IS_PINNED)
def test_memory_between_what_is_kept_goes_back_when_it_is_dropped(is_pinned: bool) -> None:
    filled(31 * MIB)  # teaches an allocator to keep pieces of up to this size
    tensors: dict[int, torch.Tensor] = {number: filled(4 * MIB, is_pinned) for number in range(NUM)}
    before = resident_bytes()
    for number in range(0, NUM, 2):
        del tensors[number]
    wait_until(lambda: before - resident_bytes() > 0.9 * NUM / 2 * 4 * MIB)
    assert all(bool((tensor == 1).all()) for tensor in tensors.values())
    assert all(tensor.is_pinned() == is_pinned for tensor in tensors.values())


@pytest.mark.parametrize("is_pinned", [False, True])
@pytest.mark.parametrize("num_elements", [0, 1, MIN_MAPPED_BYTES // 2 - 1, MIN_MAPPED_BYTES // 2, MIN_MAPPED_BYTES])
def test_a_tensor_has_the_elements_and_the_dtype_that_were_asked_for(num_elements: int, is_pinned: bool) -> None:
    tensor = host_tensor(num_elements, torch.bfloat16, is_pinned)
    tensor.fill_(2)
    assert (tensor.shape, tensor.dtype) == ((num_elements,), torch.bfloat16)
    assert float(tensor.float().sum()) == 2 * num_elements


@pytest.mark.parametrize("is_pinned", IS_PINNED)
def test_a_part_keeps_the_memory_of_the_whole(is_pinned: bool) -> None:
    part = filled(4 * MIB, is_pinned)[1:]
    others = [filled(4 * MIB, is_pinned).fill_(2.0) for _ in range(4)]  # in its place, if that were free
    assert bool((part == 1).all()) and part.is_pinned() == is_pinned and len(others) == 4


def test_what_cannot_be_pinned_is_ordinary_memory_and_the_log_says_why(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    tensor = filled(64 * MIB, is_pinned=True)
    assert bool((tensor == 1).all()) and not tensor.is_pinned()
    assert f"{64 * MIB} bytes could not be pinned" in caplog.text and "there is no GPU" in caplog.text
    before = resident_bytes()
    del tensor
    assert before - resident_bytes() > 48 * MIB


class TestOnGpu:
    pytestmark = REAL_GPU

    def test_pinned_memory_of_many_sizes_does_not_pile_up(self) -> None:
        filled(MIB, is_pinned=True).to("cuda")  # CUDA takes its own
        before = resident_bytes()
        for number in range(60):
            filled(int(1.1**number * MIB / 4) // 4 * 4, is_pinned=True)  # 760 MiB
        wait_until(lambda: resident_bytes() - before < 16 * MIB)

    def test_a_copy_that_is_on_its_way_when_the_tensor_is_dropped_arrives_whole(self) -> None:
        values = filled(64 * MIB, is_pinned=True)
        torch.cuda.synchronize()
        torch.cuda._sleep(2_000_000_000)  # clock ticks: about a second, in which the copy waits its turn
        copy = values.to("cuda", non_blocking=True)
        del values
        others = [filled(64 * MIB, is_pinned=True).fill_(2.0) for _ in range(4)]
        assert bool((copy == 1).all()) and len(others) == 4

    def test_memory_that_cannot_be_pinned_leaves_no_error_behind_for_the_next_launch(self) -> None:
        values = filled(4 * MIB, is_pinned=True)
        assert register(values), "it is pinned already"
        assert float(torch.ones(3, device="cuda").sum()) == 3

    def test_a_process_that_ends_while_memory_is_unpinned_ends_well(self) -> None:
        ended = subprocess.run([sys.executable, "-c", DROP_AND_END], capture_output=True, text=True, timeout=120)
        assert (ended.returncode, ended.stderr) == (0, "")
