"""The tensors of a safetensors file, all read at once. The whole of it in one go, outside the interpreter's lock, and nothing copied."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from loray.models.adapter_header import TensorPlace

DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class FileTensors:
    """Not mapped: a file that is cut short meanwhile would end the process."""

    def __init__(self, file: Path, places: Mapping[str, TensorPlace]) -> None:
        self._bytes = torch.from_numpy(np.fromfile(file, np.uint8))  # [bytes of the file] uint8
        self._places = places

    def __getitem__(self, name: str) -> Tensor:
        """A view, except where it does not begin at a multiple of its elements' size."""
        place = self._places[name]
        dtype = DTYPES[place.dtype]
        part = self._bytes[place.begin : place.end]
        return (part.clone() if place.begin % dtype.itemsize else part).view(dtype).view(place.shape)
