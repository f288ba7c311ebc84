"""What the host knows, brought to the device by one copy that nobody waits for. The way back is to_host.py's."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

ALIGNMENT = 16  # bytes at which each array begins


def to_device(device: torch.device, *arrays: NDArray) -> tuple[Tensor, ...]:
    """The same shapes and types, beside each other in memory of their own."""
    parts = [array.tobytes().ljust(_room(array), b"\0") for array in arrays]
    words = torch.frombuffer(bytearray(b"".join(parts)), dtype=torch.uint8)
    if device.type == "cuda":
        words = words.pin_memory()  # which torch gives to nobody else before the copy has ended
    pieces = words.to(device, non_blocking=True).split([len(part) for part in parts])
    return tuple(_read(piece, array) for piece, array in zip(pieces, arrays, strict=True))


def _room(array: NDArray) -> int:
    """Bytes, at least one more than it has: torch takes no empty buffer."""
    return (array.nbytes // ALIGNMENT + 1) * ALIGNMENT


def _read(piece: Tensor, like: NDArray) -> Tensor:
    dtype = torch.from_numpy(np.empty(0, like.dtype)).dtype
    return piece[: like.nbytes].view(dtype).view(like.shape)
