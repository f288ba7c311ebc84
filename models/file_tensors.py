"""The tensors of a safetensors file, all read at once. The whole of it in one go, outside the interpreter's lock, and nothing copied."""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from loray.models.adapter_header import TensorPlace
from loray.models.host_memory import host_tensor

DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class FileTensors:
    """Not mapped: a file that is cut short meanwhile would end the process."""

    def __init__(self, file: Path, places: Mapping[str, TensorPlace]) -> None:
        self._bytes = _read(file)  # [bytes of the file] uint8
        self._places = places

    def __getitem__(self, name: str) -> Tensor:
        """A view, except where it does not begin at a multiple of its elements' size."""
        place = self._places[name]
        dtype = DTYPES[place.dtype]
        part = self._bytes[place.begin : place.end]
        return (part.clone() if place.begin % dtype.itemsize else part).view(dtype).view(place.shape)


def _read(path: Path) -> Tensor:
    with path.open("rb", buffering=0) as file:
        content = host_tensor(path.stat().st_size, torch.uint8)
        rest = content.numpy().data
        while num_read := file.readinto(rest):
            rest = rest[num_read:]
    if rest:
        raise OSError(f"{path.name} became shorter while it was read")
    return content
