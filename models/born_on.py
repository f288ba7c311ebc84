"""Where tensors are made, and in which dtype."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def born_on(device: torch.device, dtype: torch.dtype) -> Iterator[None]:
    """Tensors made inside lie on this device, floats among them in this dtype."""
    previous = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with device:
            yield
    finally:
        torch.set_default_dtype(previous)
