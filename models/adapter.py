"""Reads and checks a PEFT LoRA folder: its config and the header of its safetensors file. Never reads a weight, never imports torch.

Whatever would make the served model differ from what PEFT computes is refused here, by name.
"""

import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PAGE_RANK = 8  # LoRA ranks in one page of the pool
CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
DTYPES = {"F32": 4, "F16": 2, "BF16": 2}  # bytes of one element
REFUSED_FIELDS = {  # field of adapter_config.json -> what it is; any value but null, false or empty is refused
    "use_dora": "DoRA",
    "lora_bias": "a bias on LoRA's B",
    "modules_to_save": "replaced modules",
    "trainable_token_indices": "trained token embeddings",
    "target_parameters": "LoRA on bare parameters",
    "layer_replication": "replicated layers",
    "alora_invocation_tokens": "activated LoRA",
    "use_qalora": "QA-LoRA",
    "use_bdlora": "block-diagonal LoRA",
    "velora_config": "VeLoRA",
    "kasa_config": "KaSA",
    "monteclora_config": "MonteCLoRA",
    "arrow_config": "Arrow routing",
}
PLAIN_INITS = {"gaussian", "eva", "orthogonal"}  # leave the base model's weights alone; pissa, olora, corda and loftq do not
TENSOR_NAME = re.compile(r"(?P<module>.+)\.lora_(?P<side>[AB])(\.[^.]+)?\.weight")

MAX_NUMBER = 1e30  # beyond it a scale is no float32 any more


class AdapterError(Exception):
    """The adapter cannot be served; the message names the adapter, the tensor or field, and the reason."""


@dataclass(frozen=True, slots=True)
class AdapterModule:
    """LoRA on one linear: y += scale * B A x."""

    a_name: str  # tensor [rank, in_features]
    b_name: str  # tensor [out_features, rank]
    rank: int
    scale: float


@dataclass(frozen=True, slots=True)
class AdapterSpec:
    rank: int  # the largest of its modules
    modules: dict[str, AdapterModule]  # by module path in the base model


@dataclass(frozen=True, slots=True)
class _Tensor:
    name: str
    shape: tuple[int, ...]


def read_adapter(folder: Path, lora_shapes: dict[str, tuple[int, int]]) -> AdapterSpec:
    """lora_shapes: module path -> (in_features, out_features) of every linear that can carry LoRA."""
    try:
        config = _read_config(folder / CONFIG_FILE)
        _check_config(config)
        tensors = _pair_tensors(_read_header(folder), lora_shapes)
        modules = {path: _read_module(path, sides, config, lora_shapes[path]) for path, sides in tensors.items()}
    except AdapterError as error:
        raise AdapterError(f"adapter {folder.name!r}: {error}") from None
    return AdapterSpec(max(module.rank for module in modules.values()), modules)


def signature(folder: Path) -> str:
    """Changes whenever one of the adapter's files does: sizes and modification times."""
    try:
        stats = [(folder / name).stat() for name in (CONFIG_FILE, WEIGHTS_FILE) if (folder / name).exists()]
    except OSError as error:
        raise AdapterError(f"adapter {folder.name!r}: {error.strerror}") from error
    return ",".join(f"{stat.st_ino}-{stat.st_size}-{stat.st_mtime_ns}" for stat in stats)


def _read_config(file: Path) -> dict[str, Any]:
    try:
        config = json.loads(file.read_bytes())
    except FileNotFoundError:
        raise AdapterError(f"{CONFIG_FILE} is missing") from None
    except (OSError, ValueError, RecursionError) as error:
        raise AdapterError(f"{CONFIG_FILE} cannot be read: {error}") from None
    if not isinstance(config, dict):
        raise AdapterError(f"{CONFIG_FILE} is not a JSON object")
    return config


def _check_config(config: dict[str, Any]) -> None:
    if config.get("peft_type") != "LORA":
        raise AdapterError(f"peft_type is {config.get('peft_type')!r}, only 'LORA' can be served")
    if config.get("bias", "none") != "none":
        raise AdapterError(f"bias is {config['bias']!r}: trained biases are not supported, only 'none'")
    for field, meaning in REFUSED_FIELDS.items():
        if config.get(field):
            raise AdapterError(f"{field} is {config[field]!r}: {meaning} is not supported")
    init = config.get("init_lora_weights", True)
    if isinstance(init, str) and init not in PLAIN_INITS:
        raise AdapterError(f"init_lora_weights is {init!r}: it changes the base model's weights; save the adapter as plain LoRA first")
    for field in ("rank_pattern", "alpha_pattern"):
        pattern = config.get(field) or {}
        if not isinstance(pattern, dict) or not all(_is_number(value) for value in pattern.values()):
            raise AdapterError(f"{field} is not a map from module names to numbers")
        for key in pattern:
            _compile(field, key)
    for field in ("r", "lora_alpha"):
        if not _is_number(config.get(field)):
            raise AdapterError(f"{field} is {config.get(field)!r}, not a number")


def _read_header(folder: Path) -> dict[str, Any]:
    """The safetensors header: tensor name -> dtype, shape, data_offsets; checked against the file's size."""
    file = folder / WEIGHTS_FILE
    if not file.is_file():
        if (folder / "adapter_model.bin").exists():
            raise AdapterError(
                "adapter_model.bin is a pickle, which can run code and is never loaded; convert it where you trust it: "
                "safetensors.torch.save_file(torch.load('adapter_model.bin', weights_only=True), 'adapter_model.safetensors')"
            )
        raise AdapterError(f"{WEIGHTS_FILE} is missing")
    try:
        with open(file, "rb") as opened:
            size = file.stat().st_size
            header_size = int.from_bytes(opened.read(8), "little")
            if size < 8 or header_size > size - 8:
                raise AdapterError(f"{WEIGHTS_FILE} is cut short: {size} bytes cannot hold its header")
            header = json.loads(opened.read(header_size))
    except (OSError, ValueError, RecursionError) as error:
        raise AdapterError(f"{WEIGHTS_FILE} is corrupt: {error}") from None
    if not isinstance(header, dict):
        raise AdapterError(f"{WEIGHTS_FILE} is corrupt: its header is not a JSON object")
    header.pop("__metadata__", None)
    if not header:
        raise AdapterError(f"{WEIGHTS_FILE} holds no tensors")
    data_size = size - 8 - header_size
    for name, entry in header.items():
        _check_entry(name, entry, data_size)
    if (used := sum(entry["data_offsets"][1] - entry["data_offsets"][0] for entry in header.values())) != data_size:
        raise AdapterError(f"{WEIGHTS_FILE} is corrupt: it has {data_size} bytes of data, and its tensors {used}")
    return header


def _check_entry(name: str, entry: Any, data_size: int) -> None:
    try:
        dtype, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
        is_plain = all(type(number) is int and number >= 0 for number in (*shape, begin, end))
    except (TypeError, KeyError, ValueError):
        is_plain = False
    if not is_plain:
        raise AdapterError(f"{WEIGHTS_FILE} is corrupt: the entry of {name} cannot be understood")
    if dtype not in DTYPES:
        raise AdapterError(f"{name} has dtype {dtype}; only {', '.join(DTYPES)} are supported")
    if end > data_size:
        raise AdapterError(f"{WEIGHTS_FILE} is cut short: {name} ends at byte {end} of {data_size}")
    if end - begin != math.prod(shape) * DTYPES[dtype]:
        raise AdapterError(f"{WEIGHTS_FILE} is corrupt: {name} has {end - begin} bytes, its shape {shape} needs another number")


def _pair_tensors(header: dict[str, Any], lora_shapes: dict[str, tuple[int, int]]) -> dict[str, dict[str, _Tensor]]:
    """Module path -> its tensors "A" and "B"."""
    modules: dict[str, dict[str, _Tensor]] = {}
    for name, entry in header.items():
        match = TENSOR_NAME.fullmatch(name)
        if match is None:
            raise AdapterError(f"tensor {name} is not supported: only lora_A and lora_B of linear layers are")
        path = _module_path(match["module"], lora_shapes)
        if path is None:
            raise AdapterError(f"tensor {name}: the base model has no module {match['module']!r} that can carry LoRA")
        sides = modules.setdefault(path, {})
        if match["side"] in sides:
            raise AdapterError(f"tensors {sides[match['side']].name} and {name} are both lora_{match['side']} of {path}")
        sides[match["side"]] = _Tensor(name, tuple(entry["shape"]))
    for path, sides in modules.items():
        if len(sides) < 2:
            present, absent = ("A", "B") if "A" in sides else ("B", "A")
            raise AdapterError(f"module {path} has {sides[present].name} but no lora_{absent}")
    return modules


def _module_path(name: str, lora_shapes: dict[str, tuple[int, int]]) -> str | None:
    """Adapters made from the bare model leave out what the whole model calls it ("model", "transformer")."""
    bare = name.removeprefix("base_model.model.")
    model = next(iter(lora_shapes), "").partition(".")[0]
    return next((path for path in (bare, name, f"{model}.{bare}") if path in lora_shapes), None)


def _read_module(path: str, sides: dict[str, _Tensor], config: dict[str, Any], shape: tuple[int, int]) -> AdapterModule:
    rank = _by_pattern(config, "rank_pattern", path, config["r"])
    alpha = _by_pattern(config, "alpha_pattern", path, config["lora_alpha"])
    if type(rank) is not int or rank < 1:
        raise AdapterError(f"the rank of {path} is {rank!r}, not a positive whole number")
    in_features, out_features = shape
    for side, wanted in (("A", (rank, in_features)), ("B", (out_features, rank))):
        if sides[side].shape != wanted:
            raise AdapterError(f"tensor {sides[side].name} has shape {sides[side].shape}, the base model and the config need {wanted}")
    scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
    return AdapterModule(sides["A"].name, sides["B"].name, rank, scale)


def _by_pattern(config: dict[str, Any], field: str, path: str, default: Any) -> Any:
    """The first key that matches the end of the path, as PEFT does it."""
    pattern = config.get(field) or {}
    return next((value for key, value in pattern.items() if _compile(field, key).match(path)), default)


def _compile(field: str, key: str) -> re.Pattern[str]:
    try:
        return re.compile(rf"(.*\.)?({key})$")
    except re.error as error:
        raise AdapterError(f"{field} has a key that is no regular expression, {key!r}: {error}") from None


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= MAX_NUMBER
