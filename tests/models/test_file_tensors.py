"""A file that is cut short while it is read is an error, not tensors with zeros at their end."""

import os
from pathlib import Path

import pytest
import torch
from torch import Tensor

from loray.models import file_tensors
from loray.models.adapter_header import TensorPlace
from loray.models.file_tensors import FileTensors
from loray.models.host_memory import MIN_MAPPED_BYTES, host_tensor


@pytest.mark.parametrize("num_bytes", [64, 2 * MIN_MAPPED_BYTES])
@pytest.mark.parametrize("num_left", ["none", "half", "all but one"])
def test_a_file_that_becomes_shorter_while_it_is_read_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_bytes: int, num_left: str
) -> None:
    file, places = tmp_path / "file", {"a": TensorPlace("F32", (num_bytes // 4,), 0, num_bytes)}
    file.write_bytes(bytes([1]) * num_bytes)
    whole = FileTensors(file, places)["a"]
    assert bool((whole.view(torch.uint8) == 1).all()) and whole.nbytes == num_bytes

    def host_tensor_while_it_is_cut(num_elements: int, dtype: torch.dtype) -> Tensor:
        os.truncate(file, {"none": 0, "half": num_bytes // 2, "all but one": num_bytes - 1}[num_left])
        return host_tensor(num_elements, dtype)

    monkeypatch.setattr(file_tensors, "host_tensor", host_tensor_while_it_is_cut)
    with pytest.raises(OSError, match="became shorter"):
        FileTensors(file, places)
