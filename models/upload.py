"""Arrays on their way from the host to the device, without waiting for it."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def upload(values: NDArray[np.generic], device: torch.device) -> Tensor:
    """A GPU gets them from pinned memory: a copy from any other may wait for the steps before it. On a CPU they share their memory."""
    tensor = torch.from_numpy(np.ascontiguousarray(values))
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)
