"""Merged adapters against peft's add_weighted_adapter: the matrices, and what a model makes of them."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from peft.utils.other import get_pattern_key
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from loray.models import merging
from loray.models.adapter import AdapterError, AdapterSpec, read_adapter
from loray.models.adapter_config import FilesChanged
from loray.models.bounded_patterns import MAX_PATTERN_LEN
from loray.models.merging import MergeMethod, _config, merge_adapters
from tests.models.conductor import Conductor, prompt_of
from tests.models.tiny_llama import oracle, oracle_generate, save_adapter, save_llama

pytestmark = pytest.mark.slow

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
Matrices = dict[str, tuple[Tensor, Tensor]]  # module path -> A [rank, inputs], B [outputs, rank]
Shapes = dict[str, tuple[int, int]]
PRUNING = [
    MergeMethod("ties", 0.4),
    MergeMethod("ties", 0.4, "frequency"),
    MergeMethod("ties"),
    MergeMethod("ties", 0.001),  # of a matrix nothing is left
    MergeMethod("dare_linear", 0.6, seed=3),
    MergeMethod("dare_ties", 0.6, seed=3),
    MergeMethod("dare_ties", 0.6, "frequency", seed=4),
    MergeMethod("dare_linear"),
]


@pytest.fixture(scope="module")
def shapes(base: Path) -> Shapes:
    return Conductor(base).report.lora_shapes


@pytest.fixture(scope="module")
def three(base: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """One rank, scales 2, 0.5 and sqrt(8), and modules that only some of them have."""
    folder = tmp_path_factory.mktemp("three")
    return [
        save_adapter(base, folder / "a", 1, r=8, lora_alpha=16),
        save_adapter(base, folder / "b", 2, ["q_proj", "k_proj", "up_proj"], r=8, lora_alpha=4),
        save_adapter(base, folder / "c", 3, ["q_proj", "down_proj"], r=8, lora_alpha=8, use_rslora=True),
    ]


def peft_merge(base: Path, folders: Sequence[Path], weights: Sequence[float], method: MergeMethod, kind: str = "") -> PeftModel:
    model = oracle(base, folders[0])
    assert isinstance(model, PeftModel)
    names = ["default", *(f"adapter_{i}" for i in range(1, len(folders)))]
    for name, folder in zip(names[1:], folders[1:], strict=True):
        model.load_adapter(folder, name)
    lora: Any = model.base_model
    inject = lora.inject_adapter

    def inject_then_seed(*args: Any, **kwargs: Any) -> None:
        """PEFT first draws initial values for the new adapter, and what dare drops only then."""
        inject(*args, **kwargs)
        torch.manual_seed(method.seed)

    lora.inject_adapter = inject_then_seed
    lora.add_weighted_adapter(
        names, list(weights), "merged", kind or method.strategy, density=method.density, majority_sign_method=method.majority_sign
    )
    model.set_adapter("merged")
    return model


def peft_matrices(model: nn.Module) -> Matrices:
    return {
        name.removeprefix("base_model.model."): (module.lora_A["merged"].weight.detach(), module.lora_B["merged"].weight.detach())
        for name, module in model.named_modules()
        if "merged" in getattr(module, "lora_A", {})
    }


def read_matrices(folder: Path, shapes: Shapes) -> Matrices:
    """As the server takes them: the scale is in B."""
    tensors = load_file(folder / WEIGHTS)
    modules = read_adapter(folder, shapes).modules
    return {path: (tensors[module.a_name], tensors[module.b_name] * module.scale) for path, module in modules.items()}


def deltas(matrices: Matrices) -> dict[str, Tensor]:
    return {path: b @ a for path, (a, b) in matrices.items()}


def assert_close(ours: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert ours.keys() == expected.keys()
    for path, matrix in ours.items():
        torch.testing.assert_close(matrix, expected[path], atol=1e-5, rtol=0)


def assert_serves(base: Path, folder: Path, expected: nn.Module) -> None:
    prompt, page_ids = prompt_of(20), [5, 2, 7, 3, 1]
    conductor = Conductor(base)
    conductor.load(folder, page_ids)
    output = conductor.generate(prompt, page_ids)
    token_ids, logprobs = oracle_generate(expected, prompt)
    assert output.token_ids == token_ids
    assert output.logprobs == pytest.approx(logprobs, abs=1e-4)


def files_of(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


@pytest.mark.parametrize("method", PRUNING, ids=str)
def test_ties_and_dare_equal_peft(base: Path, three: list[Path], shapes: Shapes, tmp_path: Path, method: MergeMethod) -> None:
    weights = [0.8, -1.3, 0.4]
    merge_adapters(three, weights, method, shapes, tmp_path / "merged")
    model = peft_merge(base, three, weights, method)
    ours, expected = read_matrices(tmp_path / "merged", shapes), peft_matrices(model)
    for side in (0, 1):
        assert_close({path: pair[side] for path, pair in ours.items()}, {path: pair[side] for path, pair in expected.items()})
    assert_serves(base, tmp_path / "merged", model)


def test_linear_equals_peft_over_different_ranks_and_modules(
    base: Path, three: list[Path], adapters: dict[int, Path], shapes: Shapes, tmp_path: Path
) -> None:
    folders, weights = [three[0], adapters[12], three[2], adapters[1]], [0.5, -0.75, 0.25, 0.0]
    merge_adapters(folders, weights, MergeMethod(), shapes, tmp_path / "merged")
    model = peft_merge(base, folders, weights, MergeMethod(), "cat")
    assert_close(deltas(read_matrices(tmp_path / "merged", shapes)), deltas(peft_matrices(model)))
    assert_serves(base, tmp_path / "merged", model)
    assert_serves(base, tmp_path / "merged", oracle(base, tmp_path / "merged"))  # PEFT reads the folder too
    ranks = {path.rpartition(".")[2]: module.rank for path, module in read_adapter(tmp_path / "merged", shapes).modules.items()}
    assert (ranks["q_proj"], ranks["down_proj"], ranks["k_proj"]) == (29, 29, 9)


@pytest.mark.parametrize("alpha", [8, -8])
def test_one_adapter_at_half_its_weight_is_exactly_half_its_delta(alpha: int, base: Path, shapes: Shapes, tmp_path: Path) -> None:
    adapter = save_adapter(base, tmp_path / "adapter", 3, ["q_proj", "down_proj"], r=8, lora_alpha=alpha, use_rslora=True)
    merge_adapters([adapter], [0.5], MergeMethod(), shapes, tmp_path / "merged")
    merged, whole = deltas(read_matrices(tmp_path / "merged", shapes)), deltas(read_matrices(adapter, shapes))
    assert merged.keys() == whole.keys()
    assert all(torch.equal(merged[path], whole[path] * 0.5) for path in whole)


@pytest.mark.parametrize("strategy", ["ties", "dare_linear", "dare_ties"])
def test_one_adapter_alone_is_not_pruned(base: Path, three: list[Path], shapes: Shapes, tmp_path: Path, strategy: Any) -> None:
    method = MergeMethod(strategy, 0.3)
    merge_adapters(three[:1], [0.7], method, shapes, tmp_path / "merged")
    expected = peft_matrices(peft_merge(base, three[:1], [0.7], method))
    assert_close(deltas(read_matrices(tmp_path / "merged", shapes)), deltas(expected))


@pytest.mark.parametrize("strategy", ["ties", "dare_linear", "dare_ties"])
def test_a_smaller_rank_is_filled_up_with_zeros(
    base: Path, three: list[Path], adapters: dict[int, Path], shapes: Shapes, tmp_path: Path, strategy: Any
) -> None:
    """PEFT takes equal ranks only, so it gets the smaller adapter with the zeros in its file. Nothing is pruned."""
    wide = save_adapter(base, tmp_path / "wide", r=8, lora_alpha=8)
    tensors, narrow = load_file(wide / WEIGHTS), load_file(adapters[4] / WEIGHTS)
    for name, tensor in tensors.items():
        tensor.zero_()[: narrow[name].shape[0], : narrow[name].shape[1]] = narrow[name]
    save_file(tensors, wide / WEIGHTS)
    method = MergeMethod(strategy)
    merge_adapters([adapters[4], three[0]], [0.6, 0.9], method, shapes, tmp_path / "merged")
    expected = peft_matrices(peft_merge(base, [wide, three[0]], [0.6, 0.9], method))
    assert_close(deltas(read_matrices(tmp_path / "merged", shapes)), deltas(expected))


def test_ties_keeps_a_share_of_an_adapters_own_values_not_of_the_zeros(
    base: Path, adapters: dict[int, Path], shapes: Shapes, tmp_path: Path
) -> None:
    silent = save_adapter(base, tmp_path / "silent", std=0.0, r=8)
    merge_adapters([adapters[1], silent], [1.0, 1.0], MergeMethod("ties", 0.5), shapes, tmp_path / "merged")
    for path, (a, b) in read_matrices(tmp_path / "merged", shapes).items():
        assert (a.count_nonzero(), b.count_nonzero()) == (shapes[path][0] // 2, shapes[path][1] // 2)


def test_the_same_merge_gives_the_same_files_and_another_seed_others(three: list[Path], shapes: Shapes, tmp_path: Path) -> None:
    state = torch.get_rng_state()
    for name, seed in (("first", 1), ("again", 1), ("other", 2)):
        merge_adapters(three, [1.0, 2.0, 3.0], MergeMethod("dare_ties", 0.5, seed=seed), shapes, tmp_path / name)
    first, again, other = (files_of(tmp_path / name) for name in ("first", "again", "other"))
    assert first == again
    assert first[CONFIG] == other[CONFIG] and first[WEIGHTS] != other[WEIGHTS]
    assert torch.equal(state, torch.get_rng_state()), "the process's own generator was disturbed"


def test_half_precision_is_merged_in_float32(base: Path, three: list[Path], shapes: Shapes, tmp_path: Path) -> None:
    half = save_adapter(base, tmp_path / "half", 7, r=4)
    save_file({name: tensor.bfloat16() for name, tensor in load_file(half / WEIGHTS).items()}, half / WEIGHTS)
    merge_adapters([half, three[0]], [0.3, 0.7], MergeMethod(), shapes, tmp_path / "merged")
    assert {tensor.dtype for tensor in load_file(tmp_path / "merged" / WEIGHTS).values()} == {torch.float32}
    model = peft_merge(base, [half, three[0]], [0.3, 0.7], MergeMethod(), "cat")
    assert_close(deltas(read_matrices(tmp_path / "merged", shapes)), deltas(peft_matrices(model)))


@pytest.mark.parametrize("method", [MergeMethod(), MergeMethod("dare_ties", 0.6, seed=5)], ids=str)
def test_lora_on_the_head_is_merged(base: Path, three: list[Path], shapes: Shapes, tmp_path: Path, method: MergeMethod) -> None:
    head = save_adapter(base, tmp_path / "head", 9, ["lm_head", "q_proj"], r=8)
    tensors = load_file(head / WEIGHTS)
    tensors.pop("base_model.model.lm_head.base_layer.weight")  # PEFT saves a copy unless told not to
    save_file(tensors, head / WEIGHTS)
    merge_adapters([three[0], head], [0.5, 0.8], method, shapes, tmp_path / "merged")
    model = peft_merge(base, [three[0], head], [0.5, 0.8], method, "cat" if method.strategy == "linear" else "")
    assert_close(deltas(read_matrices(tmp_path / "merged", shapes)), deltas(peft_matrices(model)))
    assert_serves(base, tmp_path / "merged", model)


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"use_dora": True}, "DoRA"),
        ({"lora_bias": True}, "bias on LoRA's B"),
        ({"bias": "all"}, "bias"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"targets": ["q_proj", "embed_tokens"]}, "embed"),
        ({"trainable_token_indices": [1, 2]}, "token"),
        ({"targets": ["q_proj", "lm_head"]}, "lm_head"),
    ],
)
def test_what_is_not_plain_lora_is_refused_by_name(
    three: list[Path], shapes: Shapes, tmp_path: Path, settings: dict[str, Any], word: str
) -> None:
    odd = save_adapter(save_llama(tmp_path / "base", attention_bias=True), tmp_path / "odd", r=4, **settings)
    with pytest.raises(AdapterError, match="'odd'") as caught:
        merge_adapters([three[0], odd], [0.5, 0.5], MergeMethod(), shapes, tmp_path / "merges" / "merged")
    assert word in str(caught.value)
    assert not (tmp_path / "merges").exists()


@pytest.mark.parametrize("targets", ["all-linear", ["q_proj"]], ids=["other weights", "other modules"])
def test_files_that_change_while_they_are_opened_are_refused(
    base: Path, three: list[Path], shapes: Shapes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, targets: Any
) -> None:
    mine, other = (save_adapter(base, tmp_path / name, seed, targets, r=8) for seed, name in enumerate(("mine", "other")))

    def read_while_another_is_saved(folder: Path, lora_shapes: Shapes) -> AdapterSpec:
        spec = read_adapter(folder, lora_shapes)
        shutil.copytree(other, mine, dirs_exist_ok=True)
        return spec

    monkeypatch.setattr(merging, "read_adapter", read_while_another_is_saved)
    with pytest.raises(AdapterError, match="'mine'.*changed while they were read"):
        merge_adapters([mine, three[2]], [1.0, 1.0], MergeMethod(), shapes, tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


def test_a_file_that_is_cut_short_while_it_is_read_has_changed(
    three: list[Path], shapes: Shapes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `cp` over it does: mapped, it would end the process."""
    mine = shutil.copytree(three[0], tmp_path / "mine")

    def read_while_it_is_overwritten(folder: Path, lora_shapes: Shapes) -> AdapterSpec:
        spec = read_adapter(folder, lora_shapes)
        os.truncate(mine / WEIGHTS, 2000)
        return spec

    monkeypatch.setattr(merging, "read_adapter", read_while_it_is_overwritten)
    with pytest.raises(FilesChanged, match="'mine'.*changed while they were read"):
        merge_adapters([mine, three[2]], [1.0, 1.0], MergeMethod(), shapes, tmp_path / "merged")


def test_a_weight_that_float32_cannot_hold_is_refused(three: list[Path], shapes: Shapes, tmp_path: Path) -> None:
    with pytest.raises(AdapterError, match="'a', 'b'.*float32"):
        merge_adapters(three[:2], [1e300, 1.0], MergeMethod(), shapes, tmp_path / "merged")
    assert not list(tmp_path.iterdir())


def test_a_folder_that_is_there_is_kept_and_nothing_is_left_beside_it(three: list[Path], shapes: Shapes, tmp_path: Path) -> None:
    merge_adapters(three, [1, 1, 1], MergeMethod(), shapes, tmp_path / "deep" / "merged")
    before = files_of(tmp_path / "deep" / "merged")
    merge_adapters(three, [2, 2, 2], MergeMethod(), shapes, tmp_path / "deep" / "merged")
    assert files_of(tmp_path / "deep" / "merged") == before
    assert [folder.name for folder in (tmp_path / "deep").iterdir()] == ["merged"]


def test_a_place_that_cannot_be_written_is_told_without_its_path(three: list[Path], shapes: Shapes, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(AdapterError, match="'merged' cannot be written: File exists$"):
        merge_adapters(three, [1, 1, 1], MergeMethod(), shapes, tmp_path / "file" / "merged")


def test_the_config_needs_one_pattern_for_each_rank(three: list[Path], adapters: dict[int, Path], shapes: Shapes, tmp_path: Path) -> None:
    """Every pattern is tried for every module: a pattern for each module would take minutes on a large model."""
    merge_adapters([adapters[64], adapters[12]], [1.0, 1.0], MergeMethod(), shapes, tmp_path / "merged")
    config = json.loads((tmp_path / "merged" / CONFIG).read_text())
    assert (config["r"], config["lora_alpha"], list(config["rank_pattern"].values())) == (64, 64, [76])


@pytest.mark.slow
def test_a_model_of_many_layers_has_patterns_that_are_not_too_long() -> None:
    paths = {name: [f"model.layers.{i}.{name}" for i in range(126)] for name in ("self_attn.q_proj", "self_attn.v_proj", "mlp.up_proj")}
    ranks = {path: rank for (name, rank) in zip(paths, (16, 8, 8), strict=True) for path in paths[name]}
    config = _config(ranks | dict.fromkeys(paths["self_attn.q_proj"][:70], 24))
    assert config["r"] == 8 and sorted(config["rank_pattern"].values()) == [16, 24] + [24] * (len(config["rank_pattern"]) - 2)
    assert all(len(pattern) <= MAX_PATTERN_LEN for pattern in config["rank_pattern"])
    for path, rank in (ranks | dict.fromkeys(paths["self_attn.q_proj"][:70], 24)).items():
        assert config["rank_pattern"].get(get_pattern_key(config["rank_pattern"], path), config["r"]) == rank


def test_merging_needs_no_ray() -> None:
    code = "import sys, loray.models.merging; sys.exit('ray' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
