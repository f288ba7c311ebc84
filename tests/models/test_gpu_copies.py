"""Copies between host and GPU wait for nobody: their memory on the host is pinned."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from loray.models.to_device import to_device, upload
from loray.models.to_host import ToHost
from tests.kernels.triton_marks import REAL_GPU

pytestmark = REAL_GPU
GPU = torch.device("cuda")
VALUES = np.arange(1 << 20)  # 8 MB, more than a driver takes aside of memory that is not pinned


@pytest.mark.parametrize("send", [lambda: upload(VALUES, GPU), lambda: to_device(GPU, VALUES)[0]], ids=["one", "several"])
def test_what_is_sent_to_a_busy_gpu_is_not_waited_for(send: Callable[[], Tensor]) -> None:
    send()  # so pinned memory is there to be had again
    torch.cuda.synchronize()
    torch.cuda._sleep(300_000_000)
    before = torch.cuda.current_stream().record_event()
    sent = send()
    assert not before.query()
    assert (sent.cpu().numpy() == VALUES).all()


def test_what_a_busy_gpu_sends_is_asked_for_now_and_read_when_it_is_there() -> None:
    tensors = upload(VALUES, GPU), torch.ones(3, device=GPU)
    ToHost(*tensors).wait()
    torch.cuda._sleep(300_000_000)
    asked = ToHost(*tensors)
    assert not asked.is_done
    values, ones = asked.wait()
    assert asked.is_done and (values.numpy() == VALUES).all() and ones.tolist() == [1, 1, 1]
    assert values.is_pinned() and ones.is_pinned()
