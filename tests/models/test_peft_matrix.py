"""Every item of PEFT's LoRA equals PEFT on Llama, GPT-2 and GPT-NeoX, on 1 and 2 ranks, or is refused there with its message."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest
from peft import LoraConfig

from loray.models.adapter import AdapterError
from loray.models.adapter_config import REFUSED_FIELDS
from loray.models.step import AdapterLoad
from tests.models.conductor import Conductor
from tests.models.families import FAMILIES
from tests.models.peft_items import ITEMS, NAMES, REFUSALS, items_of, save_refused
from tests.models.peft_matrix import BEGIN, DOCUMENT, END, WORLD_SIZES, PeftMatrix, is_message
from tests.models.rank_threads import ThreadGroup

pytestmark = pytest.mark.slow  # PEFT's models

CELLS = [
    pytest.param(size, family, item, id=f"tp{size}-{family}-{item}", marks=pytest.mark.slow)
    for size in WORLD_SIZES
    for family in NAMES
    for item in items_of(family)
]
HONOURED_FIELDS = {
    "peft_type", "r", "target_modules", "exclude_modules", "lora_alpha", "bias", "use_rslora", "init_lora_weights", "layers_to_transform",
    "layers_pattern", "rank_pattern", "alpha_pattern", "trainable_token_indices", "use_dora", "lora_bias", "ensure_weight_tying",
}  # fmt: skip
FIELDS_FOR_TRAINING = {
    "task_type", "peft_version", "auto_mapping", "base_model_name_or_path", "revision", "inference_mode", "lora_dropout", "fan_in_fan_out",
    "megatron_config", "megatron_core", "loftq_config", "eva_config", "corda_config", "lora_ga_config", "qalora_group_size",
    "runtime_config",
}  # fmt: skip


@pytest.fixture(scope="module")
def matrix(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PeftMatrix]:
    made = PeftMatrix(tmp_path_factory.mktemp("peft"), ThreadGroup)
    yield made
    made.close()


@pytest.fixture(scope="module")
def ranks(matrix: PeftMatrix) -> dict[str, Conductor]:
    return {family: Conductor(matrix.oracle(family).saved.base) for family in NAMES}


@pytest.mark.parametrize(("world_size", "family", "item"), CELLS)
def test_logits_and_greedy_tokens_equal_peft(matrix: PeftMatrix, world_size: int, family: str, item: str) -> None:
    assert not matrix.cell(family, world_size, item).problem


@pytest.mark.parametrize("family", NAMES)
@pytest.mark.parametrize("name", REFUSALS)
def test_what_is_refused_is_refused_with_its_message(
    matrix: PeftMatrix, ranks: dict[str, Conductor], tmp_path: Path, name: str, family: str
) -> None:
    refusal, rank = REFUSALS[name], ranks[family]
    served, refused = save_refused(matrix.oracle(family).saved.base, tmp_path, refusal, NAMES[family])
    rank.runner.host_adapters.prepare(str(served), "")
    with pytest.raises(AdapterError) as caught:
        rank.runner.host_adapters.prepare(str(refused), "")
    assert str(caught.value).startswith("adapter 'refused': ") and is_message(refusal.message, str(caught.value))
    failed = rank.step(loads=[AdapterLoad(str(served), [0]), AdapterLoad(str(refused), [1])])[2]
    assert failed == {1: str(caught.value)}


def test_every_field_of_peft_is_honoured_or_refused_or_for_training() -> None:
    fields = {field.name for field in dataclasses.fields(LoraConfig)}
    assert fields == HONOURED_FIELDS | REFUSED_FIELDS.keys() | FIELDS_FOR_TRAINING


@pytest.mark.parametrize("family", NAMES)
def test_every_item_changes_what_the_base_model_computes(matrix: PeftMatrix, family: str) -> None:
    oracle, tokens = matrix.oracle(family), list(range(1, 40))
    base = oracle.logits("", tokens)
    assert FAMILIES.keys() >= NAMES.keys()
    assert all((oracle.logits(item, tokens) - base).abs().max() > 0.05 for item in oracle.saved.adapters)


def test_the_document_has_every_item_and_every_message() -> None:
    table = DOCUMENT.read_text(encoding="utf-8").split(BEGIN)[1].split(END)[0]
    for item in ITEMS:
        row = next((line for line in table.splitlines() if line.startswith(f"| {item} |")), "")
        assert row.count("e-0") == len(NAMES) * len(WORLD_SIZES), (
            f"run python -m tests.models.peft_matrix: {item} is not in docs/adapters.md"
        )
    for name, refusal in REFUSALS.items():
        assert f"| {name} | `{refusal.message}` |" in table
