"""Adapters prepared in host memory are served from there, whatever becomes of their files, and are gone once they are dropped."""

import json
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from loray.models import adapter_tensors
from loray.models.adapter import AdapterError, read_adapter, signature
from loray.models.adapter_header import TensorPlace
from loray.models.adapter_tensors import MAX_ELEMENTS_AT_ONCE, RankAdapter, Target, _check_copy, read_rank_adapter
from loray.models.file_tensors import FileTensors
from loray.models.host_adapters import HostAdapters
from loray.models.linear import Linear, row_linear
from loray.models.parallel import Parallel
from loray.models.shards import Shard
from loray.models.step import AdapterLoad, Step
from loray.models.vocabulary import Embedding
from tests.models.conductor import Conductor, prompt_of
from tests.models.tiny_llama import save_adapter

PROMPT = prompt_of(20)


@pytest.fixture
def folder(adapters: dict[int, Path], tmp_path: Path) -> Path:
    return shutil.copytree(adapters[8], tmp_path / "mine")


def load(conductor: Conductor, folder: Path, version: str) -> dict[int, str]:
    return conductor.step(loads=[AdapterLoad(str(folder), [3], version)])[2]


@pytest.mark.parametrize("settings", [{"r": 8}, {"r": 8, "use_dora": True}], ids=["LoRA", "DoRA"])
def test_a_prepared_version_is_served_after_its_files_are_gone(base: Path, tmp_path: Path, settings: dict[str, int]) -> None:
    folder = save_adapter(base, tmp_path / "mine", **settings)
    version, conductor = signature(folder), Conductor(base)
    conductor.load(folder, [3])
    expected = conductor.generate(PROMPT, [3])
    conductor.runner.host_adapters.prepare(str(folder), version)
    shutil.rmtree(folder)
    assert conductor.step(loads=[AdapterLoad(str(base), [3])])[2], "a model is no adapter: the page is empty now"
    assert load(conductor, folder, version) == {}
    assert conductor.generate(PROMPT, [3]) == expected


def test_all_that_is_kept_of_an_adapter_counts(base: Path, tmp_path: Path) -> None:
    folder = save_adapter(base, tmp_path / "mine", r=8, use_dora=True)
    host = Conductor(base).runner.host_adapters
    num_bytes = host.prepare(str(folder), signature(folder))
    adapter = host.find(str(folder), signature(folder))
    assert adapter and adapter.squares and adapter.vectors
    assert num_bytes == adapter.values.nbytes + sum(
        tensor.nbytes for kept in (adapter.vectors, adapter.squares) for tensor in kept.values()
    )


def test_two_versions_of_one_folder_are_kept_apart(base: Path, adapters: dict[int, Path], folder: Path) -> None:
    conductor, first = Conductor(base), signature(folder)
    conductor.runner.host_adapters.prepare(str(folder), first)
    shutil.copytree(adapters[4], folder, dirs_exist_ok=True)
    second = signature(folder)
    conductor.runner.host_adapters.prepare(str(folder), second)
    outputs = []
    for version, adapter in ((first, adapters[8]), (second, adapters[4])):
        assert load(conductor, folder, version) == {}
        outputs.append(conductor.generate(PROMPT, [3]))
        conductor.load(adapter, [4])
        assert outputs[-1] == conductor.generate(PROMPT, [4])
    assert outputs[0] != outputs[1]


def test_what_is_dropped_is_read_again_and_holds_no_bytes(base: Path, folder: Path) -> None:
    conductor, version = Conductor(base), signature(folder)
    host = conductor.runner.host_adapters
    assert host.prepare(str(folder), version) == host.num_bytes > 0
    host.drop(str(folder), version)
    host.drop(str(folder), version)
    assert host.num_bytes == 0
    shutil.rmtree(folder)
    assert "changed" in load(conductor, folder, version)[0]


def test_its_bytes_are_those_of_its_matrices(base: Path, folder: Path) -> None:
    wanted = sum(tensor.nbytes for tensor in load_file(folder / "adapter_model.safetensors").values())
    assert Conductor(base).runner.host_adapters.prepare(str(folder), "") == wanted


def test_preparing_twice_keeps_one_and_does_not_read_again(base: Path, folder: Path) -> None:
    host = Conductor(base).runner.host_adapters
    version = signature(folder)
    num_bytes = host.prepare(str(folder), version)
    shutil.rmtree(folder)
    assert host.prepare(str(folder), version) == num_bytes == host.num_bytes


def test_threads_that_prepare_at_once_keep_one(base: Path, folder: Path) -> None:
    host, version, start = Conductor(base).runner.host_adapters, signature(folder), threading.Barrier(4)
    sizes = []

    def prepare() -> None:
        start.wait()
        sizes.append(host.prepare(str(folder), version))

    threads = [threading.Thread(target=prepare) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sizes == [host.num_bytes] * 4


def test_what_cannot_be_read_is_refused_and_not_kept(base: Path, folder: Path) -> None:
    host, version = Conductor(base).runner.host_adapters, signature(folder)
    (folder / "adapter_config.json").write_text("{}")
    with pytest.raises(AdapterError, match="changed after they were checked"):
        host.prepare(str(folder), version)
    with pytest.raises(AdapterError, match="'mine'"):
        host.prepare(str(folder), signature(folder))
    assert host.num_bytes == 0


def test_files_that_change_while_they_are_read_are_refused_and_not_kept(base: Path, adapters: dict[int, Path], folder: Path) -> None:
    read = Conductor(base).runner.host_adapters.read

    def read_while_another_is_saved(path: Path) -> RankAdapter:
        adapter = read(str(path), "")
        shutil.copytree(adapters[4], path, dirs_exist_ok=True)
        return adapter

    host, version = HostAdapters(read_while_another_is_saved), signature(folder)
    with pytest.raises(AdapterError, match="'mine'.*changed after they were checked"):
        host.prepare(str(folder), version)
    assert host.num_bytes == 0 and host.find(str(folder), version) is None


def test_a_load_of_what_was_not_prepared_keeps_nothing(base: Path, folder: Path) -> None:
    conductor = Conductor(base)
    assert load(conductor, folder, signature(folder)) == {}
    assert conductor.runner.host_adapters.num_bytes == 0


def test_a_page_forgets_the_gains_and_tokens_of_its_former_adapter(base: Path, adapters: dict[int, Path], tmp_path: Path) -> None:
    conductor = Conductor(base)
    special = save_adapter(base, tmp_path / "special", r=12, use_dora=True, trainable_token_indices=list(range(101)))
    conductor.load(adapters[8], [4])
    expected = conductor.generate(PROMPT, [4])
    for page in (5, 4):  # its first page, and its second
        conductor.load(special, [4, 5])
        assert conductor.generate(PROMPT, [4, 5]) != expected and len(conductor.runner._lora.specials) == 1
        conductor.load(adapters[8], [page])
        assert conductor.generate(PROMPT, [page]) == expected and not conductor.runner._lora.specials
    conductor.load(special, [4, 5])
    conductor.runner.execute(Step(1000, [], [], [], freed_pages=[4, 5]))
    assert not conductor.runner._lora.specials


def linear_target(inputs: int, outputs: int, part: Shard) -> dict[str, Target]:
    linear: Linear = row_linear("lin", (inputs, part), outputs, False, Parallel())
    return {"x.lin": Target(linear, 0, linear.projections[0])}


def save_linear(folder: Path, tensors: dict[str, torch.Tensor], **config: Any) -> None:
    save_file({f"x.lin.{name}": tensor for name, tensor in tensors.items()}, folder / "adapter_model.safetensors")
    rank = len(tensors["lora_A.weight"])
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": rank, "target_modules": ["lin"], **config}))


def test_matrices_larger_than_one_step_are_read_whole(tmp_path: Path) -> None:
    """Read in pieces, of which each is too small for torch to share it out among threads."""
    inputs, outputs, rank = 1500, 900, 50
    a, b = torch.randn(rank, inputs), torch.randn(outputs, rank)
    assert min(a.numel(), b.numel()) > MAX_ELEMENTS_AT_ONCE
    save_linear(tmp_path, {"lora_A.weight": a, "lora_B.weight": b}, lora_alpha=25)
    targets = linear_target(inputs, outputs, Shard(100, 1300))
    adapter = read_rank_adapter(tmp_path, read_adapter(tmp_path, {"x.lin": (inputs, outputs)}), targets, is_pinned=False)
    found = adapter.matrices(torch.device("cpu"))
    assert found["x.lin", "a"].equal(a[:, 100:1400]) and found["x.lin", "b"].equal(b.T * 0.5)


def test_copies_of_the_base_models_weights_are_not_held_in_memory(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save_adapter(base, tmp_path / "mine", targets=["q_proj", "lm_head"], r=8)
    held: set[str] = set()

    def holding(file: Path, places: dict[str, TensorPlace]) -> FileTensors:
        held.update(places)
        return FileTensors(file, places)

    monkeypatch.setattr(adapter_tensors, "FileTensors", holding)
    Conductor(base).runner.host_adapters.prepare(str(folder), "")
    assert load_file(folder / "adapter_model.safetensors").keys() - held == {"base_model.model.lm_head.base_layer.weight"}


@pytest.mark.parametrize("row", [0, 1000, 1999])
def test_every_row_of_a_copy_must_be_the_base_models_own(tmp_path: Path, row: int) -> None:
    embedding = Embedding(2000, 36, Parallel())
    torch.nn.init.normal_(embedding.weight)
    assert embedding.weight.numel() > 2 * MAX_ELEMENTS_AT_ONCE
    copy, file = embedding.weight.detach().clone(), tmp_path / "file"
    place = TensorPlace("F32", (2000, 36), 5, 5 + copy.nbytes)
    file.write_bytes(bytes(5) + copy.numpy().tobytes())
    _check_copy(file, place, "x", embedding)
    copy[row] *= 1.03
    file.write_bytes(bytes(5) + copy.numpy().tobytes())
    with pytest.raises(AdapterError, match="tensor x is not the base model's own"):
        _check_copy(file, place, "x", embedding)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["lora_B.weight", "lora_B.bias"])
def test_numbers_that_are_not_finite_are_refused_by_name(tmp_path: Path, name: str, value: float) -> None:
    tensors = {"lora_A.weight": torch.randn(4, 6), "lora_B.weight": torch.randn(5, 4), "lora_B.bias": torch.randn(5)}
    tensors[name].view(-1)[1] = value
    save_linear(tmp_path, tensors, lora_alpha=4, lora_bias=True)
    with pytest.raises(AdapterError, match=rf"tensor x\.lin\.{name} has numbers that are not finite, or too large for float32"):
        read_rank_adapter(tmp_path, read_adapter(tmp_path, {"x.lin": (6, 5)}), linear_target(6, 5, Shard(0, 6)), is_pinned=False)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_halves_are_scaled_in_float32(tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = {"lora_A.weight": torch.randn(3, 6).to(dtype), "lora_B.weight": torch.randn(5, 3).to(dtype)}
    save_linear(tmp_path, tensors, lora_alpha=1)
    spec = read_adapter(tmp_path, {"x.lin": (6, 5)})
    adapter = read_rank_adapter(tmp_path, spec, linear_target(6, 5, Shard(0, 6)), is_pinned=False)
    assert adapter.matrices(torch.device("cpu"))["x.lin", "b"].equal(tensors["lora_B.weight"].T.float() * (1 / 3))
