"""Memory for adapters goes back to the machine, whatever else lives on beside it."""

import psutil
import pytest
import torch

from loray.models.host_memory import MIN_MAPPED_BYTES, host_tensor

MIB = 1 << 20
NUM = 24


def resident_bytes() -> int:
    return int(psutil.Process().memory_info().rss)


def filled(num_bytes: int) -> torch.Tensor:
    return host_tensor(num_bytes // 4, torch.float32).fill_(1.0)


def test_memory_between_what_is_kept_goes_back_when_it_is_dropped() -> None:
    filled(31 * MIB)  # teaches an allocator to keep pieces of up to this size
    tensors: dict[int, torch.Tensor] = {number: filled(4 * MIB) for number in range(NUM)}
    before = resident_bytes()
    for number in range(0, NUM, 2):
        del tensors[number]
    assert before - resident_bytes() > 0.9 * NUM / 2 * 4 * MIB
    assert all(bool((tensor == 1).all()) for tensor in tensors.values())


@pytest.mark.parametrize("num_elements", [0, 1, MIN_MAPPED_BYTES // 2 - 1, MIN_MAPPED_BYTES // 2, MIN_MAPPED_BYTES])
def test_a_tensor_has_the_elements_and_the_dtype_that_were_asked_for(num_elements: int) -> None:
    tensor = host_tensor(num_elements, torch.float16)
    tensor.fill_(2)
    assert (tensor.shape, tensor.dtype) == ((num_elements,), torch.float16)
    assert float(tensor.float().sum()) == 2 * num_elements
