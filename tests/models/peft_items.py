"""What PEFT's LoRA can do, item by item, as random adapters on tiny models: those that are served, and those that are refused.

Knows how to make them, not how they are served.
"""

import json
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from tests.models.families import base_oracle

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"


@dataclass(frozen=True, slots=True)
class Names:
    """What one architecture calls its modules."""

    column: str  # a linear cut by outputs, with others fused to it or fused itself
    row: str  # a linear cut by inputs
    layers: str
    embedding: str


NAMES = {
    "llama": Names("k_proj", "down_proj", "layers", "embed_tokens"),
    "gpt2": Names("c_attn", "c_proj", "h", "wte"),
    "gpt_neox": Names("query_key_value", "dense_4h_to_h", "layers", "embed_in"),
}
NAMED = "keys with the adapter's name"
Settings = dict[str, Any]
ITEMS: dict[str, Callable[[Names], Settings]] = {
    "rank 1": lambda names: {"r": 1, "lora_alpha": 2},
    "rank 12, lora_alpha unlike it": lambda names: {"r": 12, "lora_alpha": 30},
    "rank 256": lambda names: {"r": 256, "lora_alpha": 100},
    "use_rslora": lambda names: {"r": 16, "lora_alpha": 6, "use_rslora": True},
    "rank_pattern": lambda names: {"r": 6, "rank_pattern": {names.column: 3, rf".*\.1\..*{names.row}": 20}},
    "alpha_pattern": lambda names: {"r": 6, "lora_alpha": 4, "alpha_pattern": {names.row: -18, rf"{names.layers}\.0\..*": 1}},
    "rank_pattern, alpha_pattern and use_rslora": lambda names: {
        "r": 6,
        "rank_pattern": {names.row: 10},
        "alpha_pattern": {names.row: 3, names.column: 9},
        "use_rslora": True,
    },
    "target_modules, a list": lambda names: {"target_modules": [names.column, names.row]},
    "target_modules, a regular expression": lambda names: {"target_modules": rf".*\.1\..*({names.column}|{names.row})"},
    "target_modules, all-linear": lambda names: {"r": 4},
    "exclude_modules": lambda names: {"exclude_modules": [names.column]},
    "layers_to_transform": lambda names: {"target_modules": [names.column, names.row], "layers_to_transform": [1]},
    "layers_pattern": lambda names: {"target_modules": [names.row], "layers_to_transform": [0], "layers_pattern": names.layers},
    "fan_in_fan_out": lambda names: {"r": 4, "lora_alpha": 12, "target_modules": [names.row]},
    "use_dora": lambda names: {"use_dora": True},
    "use_dora with rank_pattern and use_rslora": lambda names: {
        "use_dora": True,
        "target_modules": [names.row, names.column],
        "use_rslora": True,
        "rank_pattern": {names.row: 11},
    },
    "use_dora on the embedding and the head": lambda names: {
        "use_dora": True,
        "target_modules": [names.embedding, "lm_head", names.row],
    },
    "lora_bias": lambda names: {"lora_bias": True},
    "lora_bias on the head": lambda names: {"lora_bias": True, "target_modules": ["lm_head"]},
    "bias, lora_only": lambda names: {"bias": "lora_only", "target_modules": [names.column, names.row]},
    "bias, lora_only, with lora_bias": lambda names: {"bias": "lora_only", "lora_bias": True, "lora_alpha": 24},
    "bias, lora_only, with DoRA": lambda names: {"bias": "lora_only", "use_dora": True},
    "LoRA on the embedding": lambda names: {"target_modules": [names.embedding, names.column], "r": 5},
    "LoRA on the embedding alone": lambda names: {"target_modules": [names.embedding], "r": 12},
    "LoRA on the head": lambda names: {"target_modules": ["lm_head", names.row], "r": 5},
    "trainable_token_indices": lambda names: {"trainable_token_indices": list(range(1, 101, 3))},
    "trainable_token_indices by module": lambda names: {"trainable_token_indices": {names.embedding: [70, 3, 55]}},
    "init_lora_weights that leave the base model alone": lambda names: {"init_lora_weights": "gaussian"},
    NAMED: lambda names: {"use_dora": True, "target_modules": [names.embedding, names.column, "lm_head"]},
}
ITEMS_OF_ONE: dict[str, tuple[str, Callable[[Names], Settings]]] = {  # where only one architecture has them
    "bias, all": ("llama", lambda names: {"bias": "all", "target_modules": [names.column]}),
    "trainable_token_indices of the head": (
        "llama",
        lambda names: {"trainable_token_indices": {names.embedding: [5, 9], "lm_head": [100, 9, 2]}},
    ),
}


def items_of(family: str) -> dict[str, Settings]:
    names = NAMES[family]
    own = {item: make(names) for item, (only, make) in ITEMS_OF_ONE.items() if only == family}
    return {item: make(names) for item, make in ITEMS.items()} | own


def save_item(base: Path, folder: Path, settings: Mapping[str, Any], save_embedding_layers: bool | str = "auto") -> Path:
    """Everything that PEFT would train is random, and large enough to matter."""
    torch.manual_seed(len(str(folder)))
    model = base_oracle(base)
    has_conv1d = any(isinstance(module, Conv1D) for module in model.modules())
    config = LoraConfig(**{"r": 8, "lora_alpha": 8, "target_modules": "all-linear", "fan_in_fan_out": has_conv1d, **settings})
    model = get_peft_model(model, config)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            _randomize(name, parameter)
    model.save_pretrained(folder, save_embedding_layers=save_embedding_layers)
    return folder


def with_names(adapter: Path) -> Path:
    """The same adapter, with the adapter's name in its tensors' names, as a model has them and PEFT's files do not."""
    named = shutil.copytree(adapter, adapter.with_name(f"{adapter.name}, in the file"))
    tensors = load_file(named / WEIGHTS_FILE)
    kinds = r"(lora_[AB]|lora_magnitude_vector|lora_embedding_[AB])"
    save_file({re.sub(kinds, r"\1.mine", name): tensor for name, tensor in tensors.items()}, named / WEIGHTS_FILE)
    return named


@torch.no_grad()
def _randomize(name: str, parameter: Tensor) -> None:
    if "magnitude" in name:
        parameter.mul_(torch.empty_like(parameter).uniform_(0.6, 1.4))
    elif "lora_" in name and parameter.dim() == 2:
        rank = min(parameter.shape)
        nn.init.normal_(parameter, std=0.4 / max(rank, 8) ** 0.5)
    else:
        parameter.add_(torch.randn_like(parameter) * 0.3)


TRAINED_TOKENS = "token_adapter.trainable_tokens_delta"
Change = Callable[[Path, Names], None]  # of a good adapter's folder


def config_with(**fields: Any) -> Change:
    def change(folder: Path, names: Names) -> None:
        file = folder / CONFIG_FILE
        file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))

    return change


def tensors_with(edit: Callable[[dict[str, Tensor], Names], Any]) -> Change:
    def change(folder: Path, names: Names) -> None:
        tensors = load_file(folder / WEIGHTS_FILE)
        edit(tensors, names)
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / WEIGHTS_FILE)

    return change


def _train_tokens_too(folder: Path, names: Names) -> None:
    def edit(tensors: dict[str, Tensor], names: Names) -> None:
        name = next(name for name in tensors if name.endswith("lora_embedding_B"))  # [hidden_size, rank]
        tensors[name.replace("lora_embedding_B", TRAINED_TOKENS)] = torch.zeros(2, len(tensors[name]))

    config_with(trainable_token_indices=[1, 2])(folder, names)
    tensors_with(edit)(folder, names)


def _without(part: str) -> Change:
    """Of the tensors' names."""

    def edit(tensors: dict[str, Tensor], names: Names) -> None:
        for name in [name for name in tensors if part in name]:
            del tensors[name]

    return tensors_with(edit)


def _grow(tensors: dict[str, Tensor], ending: str, dim: int) -> None:
    """As if the vocabulary had got two more tokens."""
    name = next(name for name in tensors if name.endswith(ending))
    tensors[name] = torch.cat([tensors[name], torch.zeros_like(tensors[name].narrow(dim, 0, 2))], dim)


def _keep_copy_alone(folder: Path, names: Names) -> None:
    """Of the head, without the LoRA on it; not quite a copy."""

    def edit(tensors: dict[str, Tensor], names: Names) -> None:
        copy = tensors["base_model.model.lm_head.base_layer.weight"] * 1.03
        tensors.clear()
        tensors["base_model.model.lm_head.weight"] = copy

    config_with(target_modules=[names.column])(folder, names)
    tensors_with(edit)(folder, names)


def _add_copy_of_embedding(tensors: dict[str, Tensor], names: Names) -> None:
    name = next(name for name in tensors if name.endswith(TRAINED_TOKENS))
    tensors[name.replace(TRAINED_TOKENS, "weight")] = torch.zeros(101, 36)


def _add(name: str, *shape: int) -> Change:
    return tensors_with(lambda tensors, names: tensors.update({f"base_model.model.{name}": torch.zeros(shape)}))


def _with_two_names(folder: Path, names: Names) -> None:
    tensors = load_file(folder / WEIGHTS_FILE)
    named = {re.sub(r"(\.\d+\..*lora_[AB])", r"\1.mine" if ".0." in name else r"\1.other", name): tensors[name] for name in tensors}
    save_file(named, folder / WEIGHTS_FILE)


def _as_pickle(folder: Path, names: Names) -> None:
    (folder / WEIGHTS_FILE).rename(folder / "adapter_model.bin")


@dataclass(frozen=True, slots=True)
class Refusal:
    settings: Callable[[Names], Settings]  # of an adapter that is served
    change: Change  # and then not
    message: str  # after the adapter's name; "…" stands for anything


def _plain(names: Names) -> Settings:
    return {"target_modules": [names.column]}


def _embedding(names: Names) -> Settings:
    return {"target_modules": [names.embedding]}


def _head(names: Names) -> Settings:
    return {"target_modules": ["lm_head"]}


def _tokens(names: Names) -> Settings:
    return {"target_modules": [names.column], "trainable_token_indices": [1, 2]}


NOT_SUPPORTED = "is not supported"
RESIZED = f"the adapter was made with a resized vocabulary, which {NOT_SUPPORTED}"
REFUSALS: dict[str, Refusal] = {
    "modules_to_save": Refusal(
        _plain, config_with(modules_to_save=["lm_head"]), f"modules_to_save is ['lm_head']: a module trained as a whole {NOT_SUPPORTED}"
    ),
    "modules_to_save, the embedding": Refusal(
        _plain,
        config_with(modules_to_save=["embed_tokens"]),
        f"modules_to_save is ['embed_tokens']: a module trained as a whole {NOT_SUPPORTED}",
    ),
    "modules_to_save, a classification head": Refusal(
        _plain,
        _add("score.weight", 2, 8),
        "tensor base_model.model.score.weight replaces a weight of the base model: modules trained as a whole and added tokens are not "
        "supported",
    ),
    "added tokens, LoRA on the embedding": Refusal(
        _embedding,
        tensors_with(lambda tensors, names: _grow(tensors, "lora_embedding_A", 1)),
        f"tensor … has shape …, the base model and the config need …: {RESIZED}",
    ),
    "added tokens, LoRA on the head": Refusal(
        _head,
        tensors_with(lambda tensors, names: _grow(tensors, "lora_B.weight", 0)),
        f"tensor … has shape …, the base model and the config need …: {RESIZED}",
    ),
    "added tokens, a copy of the head": Refusal(
        _head,
        tensors_with(lambda tensors, names: _grow(tensors, "lm_head.base_layer.weight", 0)),
        f"tensor base_model.model.lm_head.base_layer.weight has shape …, the base model and the config need …: {RESIZED}",
    ),
    "added tokens, trainable_token_indices": Refusal(
        _tokens,
        config_with(trainable_token_indices=[1, 101]),
        "trainable_token_indices is (1, 101), the base model has 101: added tokens are not supported",
    ),
    "trainable_token_indices of no embedding": Refusal(
        _plain,
        config_with(trainable_token_indices={"nowhere": [1, 2]}),
        "trainable_token_indices names 'nowhere', which is no embedding of the base model",
    ),
    "trainable_token_indices without their tensor": Refusal(
        _plain,
        config_with(trainable_token_indices=[0]),
        "trainable_token_indices names tokens of …, but they are not among the tensors",
    ),
    "trainable_token_indices of the head without their tensor": Refusal(
        lambda names: {**_plain(names), "trainable_token_indices": {names.embedding: [5, 9], "lm_head": [3]}},
        _without(f"lm_head.{TRAINED_TOKENS}"),
        "trainable_token_indices names tokens of lm_head, but they are not among the tensors",
    ),
    "trained tokens of the head beside indices of the embedding": Refusal(
        _tokens,
        _add(f"lm_head.{TRAINED_TOKENS}", 2, 36),
        f"tensor base_model.model.lm_head.{TRAINED_TOKENS}: trainable_token_indices names no tokens of lm_head, so PEFT would not read it",
    ),
    "another base model's head beside LoRA on it": Refusal(
        _head,
        tensors_with(lambda tensors, names: tensors["base_model.model.lm_head.base_layer.weight"][7].mul_(1.03)),
        "tensor base_model.model.lm_head.base_layer.weight is not the base model's own: modules trained as a whole are not supported",
    ),
    "another base model's head without LoRA on it": Refusal(
        _head,
        _keep_copy_alone,
        "tensor base_model.model.lm_head.weight is not the base model's own: modules trained as a whole are not supported",
    ),
    "a copy of the head beside LoRA, where PEFT has it under LoRA": Refusal(
        _head,
        _add("lm_head.weight", 101, 36),
        "tensor base_model.model.lm_head.weight: PEFT would not read it, for lm_head has LoRA",
    ),
    "a copy of the head under LoRA that it has not": Refusal(
        _plain,
        _add("lm_head.base_layer.weight", 101, 36),
        "tensor base_model.model.lm_head.base_layer.weight: PEFT would not read it, for lm_head has neither LoRA nor trained tokens",
    ),
    "a copy of the head under trained tokens that it has not": Refusal(
        _plain,
        _add("lm_head.token_adapter.base_layer.weight", 101, 36),
        "tensor base_model.model.lm_head.token_adapter.base_layer.weight: PEFT would not read it, for lm_head has neither LoRA nor trained "
        "tokens",
    ),
    "a copy of the embedding beside trained tokens, where PEFT has it under them": Refusal(
        _tokens, tensors_with(_add_copy_of_embedding), "tensor …: PEFT would not read it, for … has trained tokens"
    ),
    "trainable_token_indices with LoRA on the embedding": Refusal(
        _embedding,
        _train_tokens_too,
        "trainable_token_indices together with LoRA on the embedding or the head is not supported",
    ),
    "ensure_weight_tying": Refusal(
        _embedding,
        config_with(ensure_weight_tying=True),
        "ensure_weight_tying is set: LoRA on … shared with what is tied to it is not supported",
    ),
    "bias, all, of a norm": Refusal(
        _plain,
        _add("model.norm.bias", 36),
        "tensor base_model.model.model.norm.bias: the base model has no module 'base_model.model.model.norm' that can carry LoRA: "
        "trained biases of other modules than linears are not supported",
    ),
    "bias of a head that has none": Refusal(_head, _add("lm_head.base_layer.bias", 101), "tensor …: lm_head has no bias"),
    "init_lora_weights that change the base model": Refusal(
        _plain,
        config_with(init_lora_weights="pissa"),
        "init_lora_weights is 'pissa': it changes the base model's weights; save the adapter as plain LoRA first",
    ),
    "init_lora_weights, false, and a layer without tensors": Refusal(
        lambda names: {**_plain(names), "init_lora_weights": False},
        _without(".0."),
        "… has no tensors, though the config targets it: PEFT would fill them at random",
    ),
    "layers_to_transform with a regular expression": Refusal(
        _plain,
        config_with(target_modules=".*", layers_to_transform=[0]),
        "PEFT refuses layers_to_transform and layers_pattern where target_modules is a string",
    ),
    "layers_pattern alone": Refusal(
        _plain, config_with(layers_pattern="layers"), "PEFT refuses layers_pattern without layers_to_transform"
    ),
    "lora_bias with use_dora": Refusal(_plain, config_with(lora_bias=True, use_dora=True), "PEFT refuses lora_bias together with use_dora"),
    "lora_bias with init_lora_weights that draw B": Refusal(
        _plain,
        config_with(lora_bias=True, init_lora_weights="orthogonal"),
        "PEFT refuses lora_bias where init_lora_weights is 'orthogonal'",
    ),
    "target_parameters": Refusal(
        _plain, config_with(target_parameters=["w"]), f"target_parameters is ['w']: LoRA on bare parameters {NOT_SUPPORTED}"
    ),
    "layer_replication": Refusal(
        _plain, config_with(layer_replication=[[0, 1]]), f"layer_replication is [[0, 1]]: a model with replicated layers {NOT_SUPPORTED}"
    ),
    "alora_invocation_tokens": Refusal(
        _plain, config_with(alora_invocation_tokens=[5]), f"alora_invocation_tokens is [5]: activated LoRA {NOT_SUPPORTED}"
    ),
    "use_qalora": Refusal(_plain, config_with(use_qalora=True), f"use_qalora is True: QA-LoRA {NOT_SUPPORTED}"),
    "use_bdlora": Refusal(_plain, config_with(use_bdlora={"nblocks": 2}), f"use_bdlora is …: block-diagonal LoRA {NOT_SUPPORTED}"),
    "velora_config": Refusal(_plain, config_with(velora_config={"a": 1}), f"velora_config is …: VeLoRA {NOT_SUPPORTED}"),
    "kasa_config": Refusal(_plain, config_with(kasa_config={"a": 1}), f"kasa_config is …: KaSA {NOT_SUPPORTED}"),
    "monteclora_config": Refusal(_plain, config_with(monteclora_config={"a": 1}), f"monteclora_config is …: MonteCLoRA {NOT_SUPPORTED}"),
    "arrow_config": Refusal(_plain, config_with(arrow_config={"a": 1}), f"arrow_config is …: Arrow routing {NOT_SUPPORTED}"),
    "another kind than LoRA": Refusal(_plain, config_with(peft_type="IA3"), "peft_type is 'IA3', only 'LORA' can be served"),
    "use_dora without a magnitude": Refusal(
        _plain, config_with(use_dora=True), "use_dora is set, but module … has no lora_magnitude_vector"
    ),
    "a magnitude without use_dora": Refusal(
        lambda names: {**_plain(names), "use_dora": True},
        config_with(use_dora=False),
        "tensor …: use_dora is not set, so PEFT would not read it",
    ),
    "a tensor that the config does not target": Refusal(
        _plain, config_with(target_modules=["o_proj"]), "tensor …: the config does not target …, so PEFT would not read it"
    ),
    "tensors of two adapters": Refusal(
        _plain, _with_two_names, "tensors … and … are of adapters with different names: PEFT would read one of them only"
    ),
    "all-linear with LoRA on the head": Refusal(
        _head, config_with(target_modules="all-linear"), "tensor …: the config does not target lm_head, so PEFT would not read it"
    ),
    "target_modules, null": Refusal(
        _plain,
        config_with(target_modules=None),
        "target_modules is null: PEFT would guess the modules from the architecture; name them, or say 'all-linear'",
    ),
    "a pickle": Refusal(
        _plain, _as_pickle, "adapter_model.bin is a pickle, which can run code and is never loaded; convert it where you trust it: …"
    ),
}


def save_refused(base: Path, folder: Path, refusal: Refusal, names: Names) -> tuple[Path, Path]:
    """The adapter as it is served, and as it is not."""
    served = save_item(base, folder / "served", refusal.settings(names))
    refused = shutil.copytree(served, folder / "refused")
    refusal.change(refused, names)
    return served, refused
