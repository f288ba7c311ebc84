"""A file that is cut short while it is read is an error, not tensors with zeros at their end."""

import os
from pathlib import Path

import pytest
import torch
from torch import Tensor

from loray.models import file_tensors
from loray.models.adapter_header import TensorPlace
from loray.models.file_tensors import FileTensors, rows_of
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


def test_what_is_not_asked_for_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, numbers = tmp_path / "file", torch.arange(100, dtype=torch.float32)
    file.write_bytes(b"12345" + numbers.numpy().tobytes())
    ranges = {"a": (0, 2), "b": (2, 5), "c": (95, 100)}
    places = {name: TensorPlace("F32", (end - begin,), 5 + 4 * begin, 5 + 4 * end) for name, (begin, end) in ranges.items()}
    sizes: list[int] = []
    monkeypatch.setattr(file_tensors, "host_tensor", lambda size, dtype: (sizes.append(size), host_tensor(size, dtype))[1])
    tensors = FileTensors(file, places | {"none": TensorPlace("F32", (0,), 5 + 4 * 50, 5 + 4 * 50)})
    assert [tensors[name].tolist() for name in places] == [[0, 1], [2, 3, 4], [95, 96, 97, 98, 99]] and len(tensors["none"]) == 0
    assert sizes == [20, 0, 20], "what lies side by side in one go"


def test_rows_of_a_matrix_come_some_at_a_time(tmp_path: Path) -> None:
    file, numbers = tmp_path / "file", torch.arange(60, dtype=torch.float16).view(20, 3)
    file.write_bytes(b"123" + numbers.numpy().tobytes())
    parts = list(rows_of(file, TensorPlace("F16", (20, 3), 3, 3 + numbers.nbytes), range(4, 15), 5))
    assert [len(part) for part in parts] == [5, 5, 1] and torch.cat(parts).equal(numbers[4:15])
