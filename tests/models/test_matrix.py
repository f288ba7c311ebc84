"""Every native architecture on 1, 2 and 3 ranks, base and LoRA, equals transformers and PEFT; adapters that do not fit are refused."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from loray.models.adapter import WEIGHTS_FILE, AdapterError, read_adapter
from loray.models.parallel import Parallel
from loray.models.registry import ARCHITECTURES
from loray.models.step import AdapterLoad, Admission, Row
from tests.models.conductor import Conductor, Request, prompt_of
from tests.models.families import ADAPTERS, FAMILIES, config_of, random_model, save_adapter
from tests.models.matrix import BEGIN, DOCUMENT, END, WORLD_SIZES, Matrix, compare, is_vocabulary, lora_targets
from tests.models.rank_jobs import MODES, Recorder, play_modes
from tests.models.rank_processes import run_ranks
from tests.models.rank_threads import ThreadGroup

pytestmark = pytest.mark.slow  # a model of every family

RANKS = [pytest.param(size, id=f"tp{size}", marks=pytest.mark.slow) for size in WORLD_SIZES]
ONE_OF_EACH_KIND = ["llama", "gpt_neox", "opt", "gpt2"]


@pytest.fixture(scope="module")
def matrix(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Matrix]:
    made = Matrix(tmp_path_factory.mktemp("matrix"), ThreadGroup)
    yield made
    made.close()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("world_size", RANKS)
def test_logits_and_greedy_tokens_equal_transformers_and_peft(matrix: Matrix, world_size: int, family: str, mode: str) -> None:
    assert not matrix.cell(family, world_size, mode).problem


@pytest.mark.slow
def test_ranks_in_processes_of_their_own_compute_the_same_over_gloo(matrix: Matrix) -> None:
    oracle = matrix.oracle("qwen2")  # fewer key heads than ranks, a window, a tied head
    for rank in run_ranks(2, play_modes, oracle.saved.base, oracle.saved.adapters):
        assert {mode: compare(played, oracle).problem for mode, played in rank.items()} == dict.fromkeys(MODES, "")


@pytest.mark.parametrize("family", FAMILIES)
def test_its_adapters_are_on_every_linear_of_the_architecture(matrix: Matrix, family: str) -> None:
    saved = matrix.oracle(family).saved
    assert json.loads((saved.base / "config.json").read_bytes())["architectures"] == [FAMILIES[family].architecture]
    shapes = Conductor(saved.base).report.lora_shapes
    assert {name: set(read_adapter(folder, shapes).modules) for name, folder in saved.adapters.items()} == dict.fromkeys(
        ADAPTERS, {path for path in shapes if not is_vocabulary(path)}
    )


def test_the_matrix_has_every_native_architecture() -> None:
    assert {family.architecture for family in FAMILIES.values()} == set(ARCHITECTURES)


def test_the_document_has_every_row_and_what_takes_lora() -> None:
    table = DOCUMENT.read_text(encoding="utf-8").split(BEGIN)[1].split(END)[0]
    for name, family in FAMILIES.items():
        rows = [line for line in table.splitlines() if line.startswith(f"| {family.architecture}<br>{name} |")]
        assert len(rows) == 2, f"run python -m tests.models.matrix: {name} is not in docs/models.md"
        assert rows[0].endswith(f"| {', '.join(lora_targets(name))} |")
        assert rows[1].count("|") == 2 + len(WORLD_SIZES) * len(MODES)


def test_a_difference_in_a_logit_or_a_token_is_found(matrix: Matrix) -> None:
    oracle = matrix.oracle("gpt2")
    played = Recorder(oracle.saved.base, Parallel()).record(("",), num_new=4)
    assert not compare(played, oracle).problem
    played[0].logits[2, 50] += 2e-4
    assert "logits differ" in compare(played, oracle).problem
    played[0].logits[2, 50] = float("nan")
    assert "logits differ" in compare(played, oracle).problem
    tokens = played[0].token_ids
    tokens[3] = (tokens[3] + 1) % 101
    played[0].logits[:] = oracle.logits("", played[0].prompt + tokens)[-5:-1].numpy()
    assert "tokens" in compare(played, oracle).problem


def other_hidden_size(family: str, base: Path, adapter: Path, folder: Path) -> Path:
    """An adapter for a model of the same family whose hidden size is 45."""
    hidden = "n_embd" if family == "gpt2" else "hidden_size"
    changes = {hidden: 45} | ({"word_embed_proj_dim": 45} if family == "opt" else {})
    random_model(config_of(FAMILIES[family], **changes)).save_pretrained(folder / "smaller")
    return save_adapter(folder / "smaller", folder / "wrong", ADAPTERS["r8"])


def unknown_module(family: str, base: Path, adapter: Path, folder: Path) -> Path:
    wrong = shutil.copytree(adapter, folder / "wrong")
    tensors = load_file(wrong / WEIGHTS_FILE)
    name = next(iter(tensors)).partition(".lora_")[0]
    save_file({key.replace(name, f"{name}_of_another_model"): tensor for key, tensor in tensors.items()}, wrong / WEIGHTS_FILE)
    return wrong


@pytest.mark.parametrize("family", ONE_OF_EACH_KIND)
def test_an_adapter_for_another_hidden_size_is_refused_with_the_tensor_and_both_shapes(matrix: Matrix, family: str, tmp_path: Path) -> None:
    saved = matrix.oracle(family).saved
    wrong = other_hidden_size(family, saved.base, saved.adapters["r8"], tmp_path)
    with pytest.raises(AdapterError) as caught:
        read_adapter(wrong, Conductor(saved.base).report.lora_shapes)
    right = {name: tuple(tensor.shape) for name, tensor in load_file(saved.adapters["r8"] / WEIGHTS_FILE).items()}
    found = {name: tuple(tensor.shape) for name, tensor in load_file(wrong / WEIGHTS_FILE).items()}
    named = [name for name in found if f"tensor {name} has shape {found[name]}" in str(caught.value)]
    assert len(named) == 1 and str(right[named[0]]) in str(caught.value)


@pytest.mark.parametrize("family", ONE_OF_EACH_KIND)
def test_an_adapter_with_a_module_that_the_base_has_not_is_refused_with_the_tensor(matrix: Matrix, family: str, tmp_path: Path) -> None:
    saved = matrix.oracle(family).saved
    wrong = unknown_module(family, saved.base, saved.adapters["r8"], tmp_path)
    with pytest.raises(AdapterError) as caught:
        read_adapter(wrong, Conductor(saved.base).report.lora_shapes)
    unknown = [name for name in load_file(wrong / WEIGHTS_FILE) if "_of_another_model" in name]
    assert len(unknown) == 2 and any(f"tensor {name}:" in str(caught.value) for name in unknown)


class Disturbed(Conductor):
    """Adds a load to a step in which others' requests run."""

    def disturb(self, at_step: int, wrong: Path) -> None:
        self._load, self._at_step = AdapterLoad(str(wrong), [7]), at_step
        self.num_rows, self.failed_loads = 0, dict[int, str]()

    def step(
        self, rows: list[Row] | None = None, admissions: list[Admission] | None = None, loads: list[AdapterLoad] | None = None
    ) -> tuple[list[int], list[float], dict[int, str]]:
        if self.step_id + 1 != getattr(self, "_at_step", 0):
            return super().step(rows, admissions, loads)
        result = super().step(rows, admissions, [self._load])
        self.num_rows, self.failed_loads = len(rows or []), result[2]
        return result


@pytest.mark.parametrize("make_wrong", [other_hidden_size, unknown_module])
@pytest.mark.parametrize("family", ONE_OF_EACH_KIND)
def test_requests_go_on_when_a_wrong_adapter_is_refused(matrix: Matrix, family: str, make_wrong: object, tmp_path: Path) -> None:
    assert callable(make_wrong)
    saved = matrix.oracle(family).saved
    wrong = make_wrong(family, saved.base, saved.adapters["r8"], tmp_path)
    conductor = Disturbed(saved.base)
    conductor.load(saved.adapters["r8"], [2])
    requests = [Request(prompt_of(12)), Request(prompt_of(9, seed=1), [2])]
    undisturbed = conductor.play(requests)
    conductor.disturb(conductor.step_id + 3, wrong)
    assert conductor.play(requests) == undisturbed
    assert conductor.num_rows == 2 and list(conductor.failed_loads) == [0] and "tensor" in conductor.failed_loads[0]
