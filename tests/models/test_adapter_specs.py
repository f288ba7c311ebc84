"""Adapters that are alike but for their weights are understood once; whatever else differs is seen."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from loray.models import adapter_specs
from loray.models.adapter import AdapterError, AdapterSpec, Shapes, read_adapter
from loray.models.adapter_header import TensorPlace
from loray.models.adapter_specs import MAX_REMEMBERED, AdapterSpecs
from loray.models.file_tensors import FileTensors

SHAPES: Shapes = {"x.lin": (6, 4)}


def save(folder: Path, rank: int = 2, dtype: torch.dtype = torch.float32, **fields: Any) -> Path:
    folder.mkdir(exist_ok=True)
    tensors = {"x.lin.lora_A.weight": torch.randn(rank, 6), "x.lin.lora_B.weight": torch.randn(4, rank)}
    save_file({name: tensor.to(dtype) for name, tensor in tensors.items()}, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 4, "target_modules": ["lin"], **fields}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture
def num_read(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The folders that were read in full."""
    read: list[Path] = []

    def reading(folder: Path, lora_shapes: Shapes) -> AdapterSpec:
        read.append(folder)
        return read_adapter(folder, lora_shapes)

    monkeypatch.setattr(adapter_specs, "read_adapter", reading)
    return read


def test_only_weights_may_differ(tmp_path: Path, num_read: list[Path]) -> None:
    specs = AdapterSpecs(SHAPES)
    first = specs.read(save(tmp_path / "first"))
    assert specs.read(save(tmp_path / "second")) is first
    others = [save(tmp_path / "rank", rank=3), save(tmp_path / "dtype", dtype=torch.float16), save(tmp_path / "alpha", lora_alpha=8)]
    for folder in others:
        assert specs.read(folder) == read_adapter(folder, SHAPES) != first
    assert num_read == [tmp_path / "first", *others]


def test_a_file_that_has_lost_or_gained_bytes_is_not_alike(tmp_path: Path) -> None:
    specs = AdapterSpecs(SHAPES)
    specs.read(save(tmp_path / "first"))
    weights = save(tmp_path / "second") / "adapter_model.safetensors"
    whole = weights.read_bytes()
    for content in (whole[:-4], whole + bytes(4)):
        weights.write_bytes(content)
        with pytest.raises(AdapterError, match="cut short|corrupt"):
            specs.read(tmp_path / "second")


def test_files_that_change_while_they_are_read_are_not_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save(tmp_path / "one")

    def changed_meanwhile(folder: Path, lora_shapes: Shapes) -> AdapterSpec:
        return read_adapter(save(folder, lora_alpha=8), lora_shapes)

    specs = AdapterSpecs(SHAPES)
    with monkeypatch.context() as patched:
        patched.setattr(adapter_specs, "read_adapter", changed_meanwhile)
        specs.read(folder)
    assert specs.read(save(tmp_path / "two")).modules["x.lin"].scale == 2


def test_a_pipe_in_place_of_the_weights_is_not_waited_for(tmp_path: Path) -> None:
    weights = save(tmp_path / "one") / "adapter_model.safetensors"
    weights.unlink()
    os.mkfifo(weights)
    with pytest.raises(AdapterError, match="is missing"):
        AdapterSpecs(SHAPES).read(tmp_path / "one")


@pytest.mark.parametrize(
    ("places", "num_bytes"),
    [
        ([(0, 48), (0, 48), (48, 80)], 80),
        ([(0, 48), (0, 48), (48, 80)], 128),  # as many as the tensors have
        ([(0, 48), (52, 84)], 84),
        ([(4, 52), (52, 84)], 84),
        ([(0, 48), (48, 80)], 84),
    ],
)
def test_tensors_that_overlap_or_leave_holes_are_corrupt(tmp_path: Path, places: list[tuple[int, int]], num_bytes: int) -> None:
    folder = save(tmp_path / "one")
    names, shapes = ["x.lin.lora_A.weight", "y", "x.lin.lora_B.weight"], {48: [2, 6], 32: [4, 2]}
    if len(places) == 2:
        del names[1]
    entries = {
        name: {"dtype": "F32", "shape": shapes[end - begin], "data_offsets": [begin, end]}
        for name, (begin, end) in zip(names, places, strict=True)
    }
    header = json.dumps(entries).encode()
    (folder / "adapter_model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(num_bytes))
    with pytest.raises(AdapterError, match="begins at byte|its tensors end at"):
        read_adapter(folder, SHAPES)


def test_those_used_least_lately_are_forgotten(tmp_path: Path, num_read: list[Path]) -> None:
    specs = AdapterSpecs(SHAPES)
    folders = [save(tmp_path / str(i), lora_alpha=i + 1) for i in range(MAX_REMEMBERED + 1)]
    for folder in [*folders[:-1], folders[0], folders[-1], folders[0]]:
        specs.read(folder)
    assert len(num_read) == MAX_REMEMBERED + 1
    specs.read(folders[1])
    assert num_read[-1] == folders[1]


def test_a_tensor_may_begin_anywhere(tmp_path: Path) -> None:
    file = tmp_path / "file"
    values = torch.tensor([[1.5, -2.0, 3.0], [0.25, 5.0, 6.0]])
    file.write_bytes(b"abc" + values.half().numpy().tobytes()[:2] + values.numpy().tobytes() + values.half().numpy().tobytes())
    places = {"one": TensorPlace("F16", (1,), 3, 5), "a": TensorPlace("F32", (2, 3), 5, 29), "b": TensorPlace("F16", (3, 2), 29, 41)}
    tensors = FileTensors(file, places)
    assert tensors["one"].tolist() == [1.5] and tensors["a"].equal(values) and tensors["b"].equal(values.half().view(3, 2))


def test_a_tensor_beyond_the_files_end_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(16))
    with pytest.raises(OSError, match="shorter"):
        FileTensors(tmp_path / "file", {"a": TensorPlace("F32", (2, 3), 0, 24)})
