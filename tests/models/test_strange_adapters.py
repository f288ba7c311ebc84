"""Configs and headers from strangers: what is malformed or hostile is refused with what and why; what PEFT would target is what counts."""

import json
import math
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from peft import LoraConfig
from peft.tuners.tuners_utils import check_target_module_exists

from loray.models.adapter import AdapterError, AdapterSpec, most_weights_bytes, rank_in_config, read_adapter
from loray.models.adapter_config import AdapterConfig

BARE = "layers.0.self_attn.q_proj"
SHAPES = {f"model.{BARE}": (6, 4), "model.layers.1.self_attn.q_proj": (6, 4), "model.embed_tokens": (10, 6), "lm_head": (6, 10)}
CONFIG = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "target_modules": ["q_proj", "embed_tokens", "lm_head"]}
LINEAR = {"model.layers.0.self_attn.q_proj.lora_A.weight": [2, 6], "model.layers.0.self_attn.q_proj.lora_B.weight": [4, 2]}
OF_BARE_MODEL = {f"{BARE}.lora_A.weight": [2, 6], f"{BARE}.lora_B.weight": [4, 2]}
EMBEDDING = {"model.embed_tokens.lora_embedding_A": [2, 10], "model.embed_tokens.lora_embedding_B": [6, 2]}
HEAD = {"lm_head.lora_A.weight": [2, 6], "lm_head.lora_B.weight": [10, 2]}
SLOW = r"((a|b|\w|.)*)*[!x]"
FIELDS = [
    "peft_type", "r", "lora_alpha", "target_modules", "exclude_modules", "bias", "use_rslora", "use_dora", "lora_bias", "rank_pattern",
    "alpha_pattern", "layers_to_transform", "layers_pattern", "trainable_token_indices", "init_lora_weights", "ensure_weight_tying",
    "modules_to_save", "target_parameters", "arrow_config",
]  # fmt: skip
STRANGE: list[Any] = [
    None,
    True,
    5,
    -1,
    0.5,
    10**400,
    math.nan,
    "",
    "x",
    "(",
    "\ud800",
    "x" * 9999,
    [],
    [5],
    [None],
    [["F32"]],
    [10**99] * 9,
]
STRANGE += [{}, {"q_proj": None}, {"q_proj": [1]}, {"q_proj": 0.5}, {"(": 1}, {"": "x"}, [{}] * 9999]
WORDS_OF_PYTHON = ("Error", "NoneType", " object", "unhashable", "argument", "expected", "<class", "unpack", "iterable", "indices must")


def header_of(shapes: dict[str, list[int]]) -> dict[str, Any]:
    header, end = {}, 0
    for name, shape in shapes.items():
        begin, end = end, end + 4 * math.prod(shape)
        header[f"base_model.model.{name}"] = {"dtype": "F32", "shape": shape, "data_offsets": [begin, end]}
    return header


def read(folder: Path, shapes: dict[str, list[int]], header: Any = None, **changes: Any) -> AdapterSpec:
    """Of an adapter with these tensors, or with this header in the place of theirs."""
    (folder / "adapter_config.json").write_text(json.dumps(CONFIG | changes))
    encoded = json.dumps(header or header_of(shapes)).encode()
    num_bytes = 4 * sum(math.prod(shape) for shape in shapes.values())
    (folder / "adapter_model.safetensors").write_bytes(struct.pack("<Q", len(encoded)) + encoded + bytes(num_bytes))
    return read_adapter(folder, SHAPES)


def strange_headers() -> Iterator[dict[str, Any]]:
    name = f"base_model.model.{BARE}.lora_A.weight"
    for value in STRANGE:
        yield header_of(LINEAR) | {name: value}
        yield header_of(LINEAR) | {str(value): header_of(LINEAR)[f"base_model.model.model.{BARE}.lora_A.weight"]}
        for field in ("dtype", "shape", "data_offsets"):
            header = header_of(LINEAR)
            header[next(iter(header))][field] = value
            yield header


def is_clear(message: str) -> bool:
    message.encode()  # a message with half a surrogate pair could not be sent
    return len(message) < 1500 and not any(word in message for word in WORDS_OF_PYTHON)


@pytest.mark.parametrize("field", FIELDS)
def test_a_field_of_any_type_is_read_or_refused_by_what_and_why(tmp_path: Path, field: str) -> None:
    read(tmp_path, LINEAR)
    for value in STRANGE:
        try:
            read(tmp_path, LINEAR, **{field: value})
        except AdapterError as error:
            assert is_clear(str(error)), str(error)
            assert any(word in str(error) for word in (field, "does not target", "the rank of", "the config need", "at random"))


def test_a_header_of_any_kind_is_refused_by_what_and_why(tmp_path: Path) -> None:
    for header in strange_headers():
        with pytest.raises(AdapterError) as caught:
            read(tmp_path, LINEAR, header)
        assert is_clear(str(caught.value)), str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {"target_modules": SLOW},
        {"exclude_modules": SLOW},
        {"rank_pattern": {SLOW: 4}},
        {"alpha_pattern": {"k_proj": 2, SLOW: 4}},
        {"layers_pattern": ["x", SLOW], "layers_to_transform": [0]},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_a_pattern_that_takes_too_long_is_refused_by_its_field(tmp_path: Path, changes: dict[str, Any]) -> None:
    with pytest.raises(AdapterError, match=f"{next(iter(changes))} takes too long to match"):
        read(tmp_path, LINEAR, **changes)


def test_layers_are_limited_in_number(tmp_path: Path) -> None:
    with pytest.raises(AdapterError, match="layers_to_transform has 5000 entries, more than 4096"):
        read(tmp_path, LINEAR, layers_to_transform=list(range(5000)))


@pytest.mark.parametrize("field", ["target_modules", "exclude_modules", "layers_pattern"])
def test_names_and_patterns_are_limited_in_number_and_length(tmp_path: Path, field: str) -> None:
    with pytest.raises(AdapterError, match=f"{field} has 5000 entries, more than 4096"):
        read(tmp_path, LINEAR, **{field: ["x"] * 5000})
    with pytest.raises(AdapterError, match=rf"{field} has a regular expression, '.*has 5000 characters"):
        read(tmp_path, LINEAR, **{"layers_to_transform": [0] if field == "layers_pattern" else None, field: "x" * 5000})


@pytest.mark.parametrize("prefix", ["model.", ""], ids=["whole model", "bare model"])
def test_what_is_excluded_needs_no_tensors_however_the_others_begin(tmp_path: Path, prefix: str) -> None:
    shapes = {f"{prefix}{BARE}.{name}.weight": shape for name, shape in (("lora_A", [2, 6]), ("lora_B", [4, 2]))}
    other = f"{prefix}layers.1.self_attn.q_proj"
    fields = {"init_lora_weights": False, "target_modules": ["q_proj", "lm_head"] if not prefix else ["q_proj"]}
    read(tmp_path, shapes, **fields, exclude_modules=[other])
    with pytest.raises(AdapterError, match="model.layers.1.self_attn.q_proj has no tensors.*at random"):
        read(tmp_path, shapes, **fields)


@pytest.mark.parametrize("init", [None, False, "orthogonal"])
def test_a_module_without_tensors_that_peft_would_fill_at_random_is_refused(tmp_path: Path, init: Any) -> None:
    assert read(tmp_path, LINEAR, target_modules=["q_proj"], init_lora_weights="gaussian").modules, "B is zero there"
    with pytest.raises(AdapterError, match="model.layers.1.self_attn.q_proj has no tensors.*at random"):
        read(tmp_path, LINEAR, target_modules=["q_proj"], init_lora_weights=init)


@pytest.mark.parametrize("init", [None, False])
def test_a_bias_of_b_that_peft_would_fill_at_random_is_refused_where_it_is_missing(tmp_path: Path, init: Any) -> None:
    bias = {f"model.{BARE}.lora_B.bias": [4]}
    fields = {"target_modules": [BARE], "lora_bias": True}
    assert not read(tmp_path, LINEAR, **fields).modules[f"model.{BARE}"].b_bias_name, "it is zero there"
    assert read(tmp_path, LINEAR | bias, init_lora_weights=False, **fields).modules[f"model.{BARE}"].b_bias_name
    reason = f"module model.{BARE} has no bias of lora_B: PEFT would fill it at random" if init is False else "PEFT refuses lora_bias"
    with pytest.raises(AdapterError, match=reason):
        read(tmp_path, LINEAR, init_lora_weights=init, **fields)


@pytest.mark.parametrize("field", ["use_bdlora", "velora_config", "kasa_config", "monteclora_config", "arrow_config"])
def test_an_empty_config_of_a_variant_is_refused_for_peft_fills_it_with_defaults(tmp_path: Path, field: str) -> None:
    read(tmp_path, LINEAR, **{field: None})
    for value in ({}, False):
        with pytest.raises(AdapterError, match=rf"{field} is {value}: .* is not supported"):
            read(tmp_path, LINEAR, **{field: value})


@pytest.mark.parametrize("field", ["modules_to_save", "target_parameters", "layer_replication", "alora_invocation_tokens"])
def test_an_empty_list_of_what_is_refused_is_none(tmp_path: Path, field: str) -> None:
    assert read(tmp_path, LINEAR, **{field: [], "use_qalora": False}).modules


@pytest.mark.parametrize("init", ["gaussian", "GAUSSIAN", "eva", "orthogonal"])
def test_names_of_initializations_have_the_case_that_peft_knows(tmp_path: Path, init: str) -> None:
    assert read(tmp_path, LINEAR, target_modules=[BARE], init_lora_weights=init).modules
    if init != "GAUSSIAN":
        with pytest.raises(AdapterError, match="it is not known whether it changes"):
            read(tmp_path, LINEAR, init_lora_weights=init.title() if init != "gaussian" else "gauss")


@pytest.mark.parametrize("init", ["pissa", "pissa_niter_4", "corda", "OLoRA", "loftq", "lora_ga"])
def test_initializations_that_change_the_base_model_are_told_from_unknown_ones(tmp_path: Path, init: str) -> None:
    with pytest.raises(AdapterError, match=f"init_lora_weights is '{init}': it changes the base model's weights; save"):
        read(tmp_path, LINEAR, init_lora_weights=init)
    with pytest.raises(AdapterError, match="it is not known whether it changes the base model's weights; save"):
        read(tmp_path, LINEAR, init_lora_weights=f"x{init}")


def test_large_files_are_refused_before_they_are_read(tmp_path: Path) -> None:
    read(tmp_path, LINEAR)
    with open(tmp_path / "adapter_model.safetensors", "r+b") as file:
        file.write(struct.pack("<Q", (4 << 20) + 1))
        file.truncate(9 << 20)
    with pytest.raises(AdapterError, match="header of 4194305 bytes, more than 4194304"):
        read_adapter(tmp_path, SHAPES)
    (tmp_path / "adapter_config.json").write_bytes(b" " * ((1 << 20) + 1))
    with pytest.raises(AdapterError, match=r"adapter_config.json has 1048577 bytes, more than 1048576"):
        read_adapter(tmp_path, SHAPES)


@pytest.mark.parametrize(("shapes", "path"), [(EMBEDDING, "model.embed_tokens"), (HEAD, "lm_head")])
def test_all_linear_means_neither_the_embedding_nor_the_head(tmp_path: Path, shapes: dict[str, list[int]], path: str) -> None:
    assert path in read(tmp_path, LINEAR | shapes).modules
    assert len(read(tmp_path, LINEAR, target_modules="All-Linear").modules) == 1
    with pytest.raises(AdapterError, match=f"does not target {path}"):
        read(tmp_path, LINEAR | shapes, target_modules="all-linear")


def test_of_all_linears_too_some_may_be_excluded(tmp_path: Path) -> None:
    with pytest.raises(AdapterError, match=f"does not target model.{BARE}"):
        read(tmp_path, LINEAR, target_modules="all-linear", exclude_modules=["q_proj"])


def test_a_module_that_is_named_whole_is_targeted_in_whatever_layer_as_in_peft(tmp_path: Path) -> None:
    changes = {"target_modules": [f"model.{BARE}", "k_proj"], "layers_to_transform": [1]}
    assert check_target_module_exists(LoraConfig(**changes), f"model.{BARE}")
    assert read(tmp_path, LINEAR, **changes).modules.keys() == {f"model.{BARE}"}


def test_without_a_rank_and_an_alpha_they_are_those_that_peft_assumes(tmp_path: Path) -> None:
    linear = {name: [8 if size == 2 else size for size in shape] for name, shape in LINEAR.items()}
    read(tmp_path, linear, r=8)
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "target_modules": ["q_proj"]}))
    (module,) = read_adapter(tmp_path, SHAPES).modules.values()
    assert (module.rank, module.scale) == (LoraConfig().r, LoraConfig().lora_alpha / LoraConfig().r)


def test_an_empty_list_of_layers_means_all_of_them_as_in_peft(tmp_path: Path) -> None:
    assert check_target_module_exists(LoraConfig(target_modules=["q_proj"], layers_to_transform=[]), f"model.{BARE}")
    assert read(tmp_path, LINEAR, target_modules=["q_proj"], layers_to_transform=[]).modules.keys() == {f"model.{BARE}"}


@pytest.mark.parametrize("pattern", [None, "layers"])
@pytest.mark.parametrize("layers", [1, [1, 23], [10, 2]])
def test_a_layer_is_its_whole_number(tmp_path: Path, layers: Any, pattern: str | None) -> None:
    fields = {"target_modules": ["q_proj"], "layers_to_transform": layers, "layers_pattern": pattern}
    (tmp_path / "adapter_config.json").write_text(json.dumps(CONFIG | fields))
    config, peft = AdapterConfig(tmp_path / "adapter_config.json"), LoraConfig(**fields)
    names = [f"model.layers.{layer}.self_attn.q_proj" for layer in range(25)]
    targeted = [name for name in names if config.is_targeted(name, is_linear=True)]
    assert targeted == [name for name in names if check_target_module_exists(peft, name)]
    assert len(targeted) == (1 if layers == 1 else 2)


def test_no_targets_are_not_all_targets(tmp_path: Path) -> None:
    with pytest.raises(AdapterError, match="target_modules is null"):
        read(tmp_path, LINEAR, target_modules=None)
    with pytest.raises(AdapterError, match="does not target"):
        read(tmp_path, LINEAR, target_modules=[])


def test_patterns_are_asked_with_the_name_in_the_model_the_adapter_was_made_from(tmp_path: Path) -> None:
    pattern = {"^layers.0.self_attn.q_proj": 64}
    assert read(tmp_path, OF_BARE_MODEL, alpha_pattern=pattern).modules[f"model.{BARE}"].scale == 32
    assert read(tmp_path, LINEAR, alpha_pattern=pattern).modules[f"model.{BARE}"].scale == 1
    assert read(tmp_path, OF_BARE_MODEL, target_modules=r"layers\.0\..*", rank_pattern={r"^layers\..*": 2}, r=9).rank == 2


@pytest.mark.parametrize(
    ("changes", "rank"),
    [
        ({"r": 3}, 3),
        ({"r": 3, "rank_pattern": {"layers.1.self_attn.q_proj": 7}}, 7),
        ({"r": 3, "rank_pattern": {"layers.2.self_attn.q_proj": 7, "embed_tokens": 9, "lm_head": 9}}, 3),
        ({"r": 3, "target_modules": "all-linear"}, 3),
        ({"r": 3, "target_modules": r"model\.layers\.\d\..*"}, 3),
        ({"r": 3, "target_modules": r"layers\.\d\..*"}, 3),
        ({"r": 3, "target_modules": ["embed_tokens"]}, 1),
        ({"r": 3, "target_modules": ["x"], "bias": "all"}, 1),
        ({"r": 3, "target_modules": ["x"], "trainable_token_indices": [1]}, 1),
    ],
)
def test_a_config_alone_tells_the_highest_rank_of_a_linear(tmp_path: Path, changes: dict[str, Any], rank: int) -> None:
    (tmp_path / "adapter_config.json").write_text(json.dumps(CONFIG | changes))
    assert rank_in_config(tmp_path, SHAPES) == rank


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"target_modules": ["x"]}, r"target_modules is \['x'\]: the base model has no such module that can carry LoRA"),
        ({"exclude_modules": ".*"}, "the base model has no such module"),
        ({"layers_to_transform": [5], "target_modules": ["q_proj"]}, "the base model has no such module"),
        ({"trainable_token_indices": [10]}, r"trainable_token_indices is \(10,\), the base model has 10: added tokens"),
        ({"r": 0}, "is 0, not a positive whole number"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
    ],
)
def test_what_a_config_alone_refuses_needs_no_weights(tmp_path: Path, changes: dict[str, Any], reason: str) -> None:
    (tmp_path / "adapter_config.json").write_text(json.dumps(CONFIG | changes))
    with pytest.raises(AdapterError, match=reason):
        rank_in_config(tmp_path, SHAPES)


def test_dora_on_a_model_that_transformers_runs_needs_no_weights_to_be_refused(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text(json.dumps(CONFIG | {"use_dora": True}))
    assert rank_in_config(tmp_path, SHAPES) == 2
    with pytest.raises(AdapterError, match="transformers runs"):
        rank_in_config(tmp_path, {f"model.{BARE}": (6, 4)})


def test_no_adapter_with_so_many_pages_has_more_bytes(tmp_path: Path) -> None:
    copies = {"model.embed_tokens.base_layer.weight": [10, 6], "lm_head.base_layer.weight": [10, 6]}
    linears = [f"model.layers.{layer}.self_attn.q_proj.lora" for layer in (0, 1)]
    full = {f"{name}_A.weight": [8, 6] for name in linears} | {f"{name}_B.weight": [4, 8] for name in linears}
    biases = {f"{name}_B.bias": [4] for name in linears}
    spec = read(tmp_path, full | copies | biases, r=8, lora_bias=True)
    num_bytes = sum(place.end - place.begin for place in spec.places.values())
    assert most_weights_bytes(SHAPES, num_pages=1, extra_bytes=spec.extra_bytes) == 8 + (4 << 20) + num_bytes


def test_a_layers_pattern_that_matches_without_a_number_names_no_layer(tmp_path: Path) -> None:
    with pytest.raises(AdapterError, match="does not target"):
        read(tmp_path, LINEAR, layers_to_transform=[0], layers_pattern="layers|h")


def test_a_layers_pattern_may_have_groups_of_its_own(tmp_path: Path) -> None:
    assert read(tmp_path, LINEAR, layers_pattern="(h|layers)", layers_to_transform=0).modules
    with pytest.raises(AdapterError, match="does not target"):
        read(tmp_path, LINEAR, layers_pattern="(h|layers)", layers_to_transform=[1])


def test_extra_bytes_are_of_all_that_is_not_in_pages(tmp_path: Path) -> None:
    bias, magnitude = {f"model.{BARE}.lora_B.bias": [4]}, {f"model.{BARE}.lora_magnitude_vector": [4]}
    tokens = {"model.embed_tokens.token_adapter.trainable_tokens_delta": [3, 6]}
    head = HEAD | {"lm_head.base_layer.weight": [10, 6]}
    assert read(tmp_path, LINEAR).extra_bytes == 0
    assert read(tmp_path, LINEAR | bias, lora_bias=True).extra_bytes == 4 * 4
    assert read(tmp_path, LINEAR | magnitude, use_dora=True).extra_bytes == 2 * 4 * 4
    assert read(tmp_path, LINEAR | tokens, trainable_token_indices=[1, 2, 3]).extra_bytes == 4 * 3 * 6
    copies = {"model.embed_tokens.token_adapter.base_layer.weight": [10, 6], "lm_head.weight": [10, 6]}
    of_tokens = {"trainable_token_indices": [1, 2, 3], "target_modules": ["q_proj"]}
    assert read(tmp_path, LINEAR | tokens | copies, **of_tokens).extra_bytes == 4 * 3 * 6
    assert read(tmp_path, LINEAR | head | EMBEDDING).extra_bytes == 4 * 2 * (6 + 10 + 10 + 6)
