"""What the host knows, brought to the device by copies that nobody waits for. The way back is to_host.py's."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

ALIGNMENT = 16  # bytes at which each array begins


def upload(values: NDArray[np.generic], device: torch.device) -> Tensor:
    """One array. On a CPU it keeps its memory."""
    return sent(torch.from_numpy(np.ascontiguousarray(values)), device)


def to_device(device: torch.device, *arrays: NDArray) -> tuple[Tensor, ...]:
    """Several by one copy: the same shapes and types, beside each other in memory of their own."""
    parts = [array.tobytes().ljust(_room(array), b"\0") for array in arrays]
    pieces = sent(torch.frombuffer(bytearray(b"".join(parts)), dtype=torch.uint8), device).split([len(part) for part in parts])
    return tuple(_read(piece, array) for piece, array in zip(pieces, arrays, strict=True))


def sent(tensor: Tensor, device: torch.device) -> Tensor:
    """To a GPU from pinned memory, which torch gives to nobody else before the copy has ended: from any other, steps may be waited for."""
    return (tensor.pin_memory() if device.type == "cuda" else tensor).to(device, non_blocking=True)


def _room(array: NDArray) -> int:
    """Bytes, at least one more than it has: torch takes no empty buffer."""
    return (array.nbytes // ALIGNMENT + 1) * ALIGNMENT


def _read(piece: Tensor, like: NDArray) -> Tensor:
    dtype = torch.from_numpy(np.empty(0, like.dtype)).dtype
    return piece[: like.nbytes].view(dtype).view(like.shape)
