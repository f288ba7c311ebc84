"""LoRA through the rank pages against PEFT in float32."""

import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from loray.models.adapter import signature
from loray.models.lora_groups import page_runs
from loray.models.step import AdapterLoad, Sampling
from tests.models.conductor import Conductor, Output, Request, prompt_of
from tests.models.tiny_llama import oracle, oracle_generate, save_adapter, save_llama

SETTINGS: dict[str, dict[str, Any]] = {
    "rslora": {"r": 16, "lora_alpha": 8, "use_rslora": True},
    "patterns": {
        "r": 6,
        "lora_alpha": 4,
        "rank_pattern": {"q_proj": 3, "layers.1.mlp.down_proj": 20, r".*\.0\..*gate_proj": 9},
        "alpha_pattern": {"up_proj": 16, "v_proj": 1},
    },
    "one_layer_only": {"r": 4, "lora_alpha": 8, "layers_to_transform": [1]},
    "alpha_unlike_rank": {"r": 12, "lora_alpha": 32},
    "few_targets": {"r": 4, "lora_alpha": 4, "targets": ["v_proj"]},
    "a_regex_of_targets": {"r": 4, "lora_alpha": 4, "targets": r".*\.1\.mlp\.(up|down)_proj"},
}
PAGES = {1: [5], 4: [9], 8: [2], 12: [7, 3], 64: [20, 21, 22, 10, 24, 25, 27, 26]}  # some in order, some scattered


def assert_same(output: Output, expected: tuple[list[int], list[float]]) -> None:
    assert output.token_ids == expected[0]
    assert output.logprobs == pytest.approx(expected[1], abs=2e-4)


@pytest.fixture
def loaded(base: Path, adapters: dict[int, Path]) -> Conductor:
    conductor = Conductor(base)
    for rank, folder in adapters.items():
        conductor.load(folder, PAGES[rank])
    return conductor


@pytest.mark.parametrize("rank", PAGES)
def test_any_rank_equals_peft(base: Path, adapters: dict[int, Path], loaded: Conductor, rank: int) -> None:
    prompt = prompt_of(20, seed=rank)
    assert_same(loaded.generate(prompt, PAGES[rank]), oracle_generate(oracle(base, adapters[rank]), prompt))


@pytest.mark.parametrize("name", SETTINGS)
def test_every_supported_setting_equals_peft(base: Path, tmp_path: Path, name: str) -> None:
    folder = save_adapter(base, tmp_path / name, **SETTINGS[name])
    conductor, prompt = Conductor(base), prompt_of(20)
    conductor.load(folder, [4, 1, 2])
    expected = oracle_generate(oracle(base, folder), prompt)
    assert_same(conductor.generate(prompt, [4, 1, 2]), expected)
    assert expected[1] != pytest.approx(oracle_generate(oracle(base), prompt)[1], abs=1e-3), "the adapter changes nothing"


@pytest.fixture(scope="module")
def mixed(base: Path, adapters: dict[int, Path]) -> list[tuple[Request, tuple[list[int], list[float]]]]:
    """Requests of many ranks and of the base model, and what PEFT gives each alone."""
    ranks = [0, 64, 1, 0, 12, 4, 64, 8, 4, 0]
    models = {rank: oracle(base, adapters.get(rank)) for rank in set(ranks)}
    requests = [Request(prompt_of(3 + 4 * i, seed=i), PAGES.get(rank, [])) for i, rank in enumerate(ranks)]
    return [(request, oracle_generate(models[rank], request.prompt)) for rank, request in zip(ranks, requests, strict=True)]


@pytest.mark.parametrize("chunk", [10_000, 5])
@pytest.mark.parametrize("stagger", [0, 2])
def test_mixed_ranks_and_the_base_model_share_a_step(
    loaded: Conductor, mixed: list[tuple[Request, tuple[list[int], list[float]]]], chunk: int, stagger: int
) -> None:
    outputs = loaded.play([request for request, _ in mixed], chunk, stagger)
    for output, (_, expected) in zip(outputs, mixed, strict=True):
        assert_same(output, expected)


def test_a_page_forgets_its_former_adapter_wholly(base: Path, adapters: dict[int, Path]) -> None:
    """Rank 12 leaves most linears and half of its second page untouched: there the former must be gone."""
    conductor, prompt = Conductor(base), prompt_of(20)
    conductor.load(adapters[64], list(range(8)))
    conductor.load(adapters[12], [1, 0])
    assert_same(conductor.generate(prompt, [1, 0]), oracle_generate(oracle(base, adapters[12]), prompt))


def test_only_steps_with_loads_take_time_for_them(base: Path, adapters: dict[int, Path]) -> None:
    conductor = Conductor(base)
    conductor.load(adapters[8], [0])
    assert conductor.result.load_seconds > 0
    conductor.generate(prompt_of(5), [0])
    assert conductor.result.load_seconds == 0


def test_a_load_that_fails_is_told_and_leaves_empty_pages(base: Path, adapters: dict[int, Path], tmp_path: Path) -> None:
    broken = shutil.copytree(adapters[8], tmp_path / "broken")
    weights = broken / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    conductor, prompt = Conductor(base), prompt_of(20)
    conductor.load(adapters[8], [3])
    loads = [AdapterLoad(str(adapters[4]), [0]), AdapterLoad(str(broken), [3])]
    failed = conductor.step(loads=loads)[2]
    assert list(failed) == [1] and "'broken'" in failed[1] and "cut short" in failed[1]
    assert_same(conductor.generate(prompt, [3]), oracle_generate(oracle(base), prompt))
    assert_same(conductor.generate(prompt, [0]), oracle_generate(oracle(base, adapters[4]), prompt))


def test_a_load_is_refused_when_the_files_changed_since_they_were_checked(base: Path, adapters: dict[int, Path], tmp_path: Path) -> None:
    folder = shutil.copytree(adapters[8], tmp_path / "changing")
    checked = signature(folder)
    conductor = Conductor(base)
    assert conductor.step(loads=[AdapterLoad(str(folder), [0], checked)])[2] == {}
    shutil.copy(adapters[4] / "adapter_model.safetensors", folder)
    assert "changed" in conductor.step(loads=[AdapterLoad(str(folder), [0], checked)])[2][0]


def test_too_few_pages_for_the_rank_fail_the_load(base: Path, adapters: dict[int, Path]) -> None:
    assert "rank 12" in Conductor(base).step(loads=[AdapterLoad(str(adapters[12]), [0])])[2][0]


def test_a_server_without_pages_serves_the_base_model(base: Path) -> None:
    prompt = prompt_of(20)
    assert_same(Conductor(base, num_pages=0).generate(prompt), oracle_generate(oracle(base), prompt))


def test_adapters_in_half_precision_and_without_prefix_are_read(base: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = save_adapter(base, tmp_path / "half", r=4)
    tensors = load_file(folder / "adapter_model.safetensors")
    rounded = {name: tensor.bfloat16() for name, tensor in tensors.items()}
    save_file(rounded, folder / "adapter_model.safetensors")
    prompt = prompt_of(20)
    expected = oracle_generate(oracle(base, folder), prompt)
    renamed = {name.removeprefix("base_model.model.").replace(".weight", ".default.weight"): t for name, t in rounded.items()}
    save_file(renamed, folder / "adapter_model.safetensors")
    conductor = Conductor(base)
    conductor.load(folder, [0])
    assert_same(conductor.generate(prompt, [0]), expected)


@pytest.mark.parametrize("start", ["model.", "base_model.model.", ""])
def test_names_with_less_before_them_are_read_as_transformers_reads_them(base: Path, tmp_path: Path, start: str) -> None:
    from safetensors.torch import load_file, save_file

    folder = save_adapter(base, tmp_path / "renamed", r=4)
    tensors = load_file(folder / "adapter_model.safetensors")
    renamed = {name.replace("base_model.model.model.", start): tensor for name, tensor in tensors.items()}
    save_file(renamed, folder / "adapter_model.safetensors", {"format": "pt"})
    model, conductor = oracle(base), Conductor(base)
    before = oracle_generate(model, prompt_of(20))
    model.load_adapter(str(folder))  # type: ignore[operator]
    conductor.load(folder, [0])
    expected = oracle_generate(model.eval(), prompt_of(20))
    assert expected != before
    assert_same(conductor.generate(prompt_of(20), [0]), expected)


def test_copies_of_the_base_models_own_embedding_and_head_change_nothing(base: Path, tmp_path: Path) -> None:
    """PEFT saves them where it is told to, or where the vocabulary has grown since the model that the config names."""
    from safetensors.torch import load_file, save_file

    folder = save_adapter(base, tmp_path / "copies", r=4)
    tensors, own = load_file(folder / "adapter_model.safetensors"), oracle(base).state_dict()
    copies = {f"base_model.model.{name}": own[name].clone() for name in ("model.embed_tokens.weight", "lm_head.weight")}
    save_file(tensors | copies, folder / "adapter_model.safetensors")
    conductor = Conductor(base)
    conductor.load(folder, [0])
    assert_same(conductor.generate(prompt_of(20), [0]), oracle_generate(oracle(base, folder), prompt_of(20)))


def test_the_report_says_what_the_driver_needs(tmp_path: Path) -> None:
    folder = save_llama(tmp_path)
    conductor = Conductor(folder)
    report, page = conductor.report, sum(t.lora.a[:, :8].nbytes + t.lora.b[:8].nbytes for t in conductor.runner._lora._linears.values())
    assert report.page_bytes == page
    assert report.block_bytes == 2 * 16 * 2 * 2 * 8 * 4
    assert report.lora_shapes["model.layers.1.self_attn.k_proj"] == (48, 16)
    assert report.lora_shapes["model.layers.0.mlp.down_proj"] == (75, 48)
    assert report.lora_shapes["model.embed_tokens"] == (101, 48) and report.lora_shapes["lm_head"] == (48, 101)
    assert len(report.lora_shapes) == 16
    assert (report.device, report.dtype, report.free_bytes) == ("cpu", "float32", 0)


def test_neighbouring_pages_are_joined() -> None:
    assert page_runs([4, 2, 3, 9]) == ((16, 40), (72, 80))
    assert page_runs([]) == ()


def test_non_finite_adapters_show_and_harm_their_own_requests_only(base: Path, adapters: dict[int, Path], tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = shutil.copytree(adapters[8], tmp_path / "infinite")
    tensors = {name: torch.full_like(tensor, 1e38) for name, tensor in load_file(folder / "adapter_model.safetensors").items()}
    save_file(tensors, folder / "adapter_model.safetensors")
    conductor, prompt = Conductor(base), prompt_of(20)
    conductor.load(folder, [0])
    expected = oracle_generate(oracle(base), prompt)
    drawn = Request(prompt, [0], Sampling(temperature=1.0, top_p=0.9, num_alternatives=2))
    bad, good, _, worse = conductor.play(
        [Request(prompt, [0]), Request(prompt), Request(prompt_of(40)), drawn]
    )  # the longest one pads the others
    assert_same(good, expected)
    assert all(map(math.isnan, bad.logprobs + worse.logprobs))
    assert_same(conductor.generate(prompt), expected)  # in the blocks of the bad one
