"""Reads and checks adapter_config.json of a PEFT LoRA folder: what it asks for, module by module. Never opens the weights."""

import json
import math
import re
from pathlib import Path
from typing import Any

CONFIG_FILE = "adapter_config.json"
MAX_NUMBER = 1e30  # beyond it a scale is no float32 any more
REFUSED_FIELDS = {  # field -> what it is; any value but null, false or empty is refused
    "modules_to_save": "a module trained as a whole",
    "target_parameters": "LoRA on bare parameters",
    "layer_replication": "a model with replicated layers",
    "alora_invocation_tokens": "activated LoRA",
    "use_qalora": "QA-LoRA",
    "use_bdlora": "block-diagonal LoRA",
    "velora_config": "VeLoRA",
    "kasa_config": "KaSA",
    "monteclora_config": "MonteCLoRA",
    "arrow_config": "Arrow routing",
}
PLAIN_INITS = {"gaussian", "eva", "orthogonal"}  # leave the base model's weights alone; pissa, olora, corda and loftq do not


class AdapterError(Exception):
    """The adapter cannot be served; the message names the adapter, the tensor or field, and the reason."""


class AdapterConfig:
    def __init__(self, file: Path) -> None:
        self._fields = _read(file)
        self._check()
        self.use_dora = bool(self._fields.get("use_dora"))
        self.lora_bias = bool(self._fields.get("lora_bias"))
        self.ensure_weight_tying = bool(self._fields.get("ensure_weight_tying"))

    def rank(self, path: str) -> int:
        rank = self._by_pattern("rank_pattern", path, self._fields["r"])
        if type(rank) is not int or rank < 1:
            raise AdapterError(f"the rank of {path} is {rank!r}, not a positive whole number")
        return rank

    def scale(self, path: str) -> float:
        rank = self.rank(path)
        alpha = self._by_pattern("alpha_pattern", path, self._fields["lora_alpha"])
        return float(alpha / (math.sqrt(rank) if self._fields.get("use_rslora") else rank))

    def is_targeted(self, path: str) -> bool:
        """Whether PEFT would give this module LoRA; tensors of others it leaves unread, so they must not change the numbers here."""
        targets = self._fields.get("target_modules")
        excluded = self._fields.get("exclude_modules")
        if excluded and _is_listed("exclude_modules", excluded, path):
            return False
        if not targets or (isinstance(targets, str) and targets.lower() == "all-linear"):
            return True
        if not _is_listed("target_modules", targets, path):
            return False
        return isinstance(targets, str) or path in targets or self._is_in_layers(path)

    def token_ids(self, path: str) -> tuple[int, ...]:
        """Tokens whose embeddings were trained, of the embedding or head at this path."""
        indices = self._fields.get("trainable_token_indices") or []
        if isinstance(indices, dict):
            indices = next((ids for key, ids in indices.items() if f".{path}".endswith(f".{key}")), [])
        if not isinstance(indices, list) or not all(type(index) is int for index in indices):
            raise AdapterError("trainable_token_indices holds no lists of whole numbers")
        return tuple(indices)

    def _check(self) -> None:
        fields = self._fields
        if fields.get("peft_type") != "LORA":
            raise AdapterError(f"peft_type is {fields.get('peft_type')!r}, only 'LORA' can be served")
        if fields.get("bias", "none") not in ("none", "lora_only", "all"):
            raise AdapterError(f"bias is {fields['bias']!r}, not 'none', 'lora_only' or 'all'")
        for field, meaning in REFUSED_FIELDS.items():
            if fields.get(field):
                raise AdapterError(f"{field} is {fields[field]!r}: {meaning} is not supported")
        init = fields.get("init_lora_weights", True)
        if isinstance(init, str) and init not in PLAIN_INITS:
            raise AdapterError(f"init_lora_weights is {init!r}: it changes the base model's weights; save the adapter as plain LoRA first")
        for field in ("rank_pattern", "alpha_pattern"):
            pattern = fields.get(field) or {}
            if not isinstance(pattern, dict) or not all(_is_number(value) for value in pattern.values()):
                raise AdapterError(f"{field} is not a map from module names to numbers")
            for key in pattern:
                _compile(field, rf"(.*\.)?({key})$")
        for field in ("r", "lora_alpha"):
            if not _is_number(fields.get(field)):
                raise AdapterError(f"{field} is {fields.get(field)!r}, not a number")

    def _by_pattern(self, field: str, path: str, default: Any) -> Any:
        """The first key that matches the end of the path, as PEFT does it."""
        pattern = self._fields.get(field) or {}
        return next((value for key, value in pattern.items() if _compile(field, rf"(.*\.)?({key})$").match(path)), default)

    def _is_in_layers(self, path: str) -> bool:
        layers, names = self._fields.get("layers_to_transform"), self._fields.get("layers_pattern")
        if layers is None or layers == []:
            return True
        patterns = [rf"(?:^|.*?\.){name}\.(\d+)\." for name in ([names] if isinstance(names, str) else names or [])]
        matches = (_compile("layers_pattern", pattern).match(path) for pattern in patterns or [r".*?\.[^.]*\.(\d+)\."])
        found = next((match for match in matches if match), None)
        return found is not None and int(found[1]) in (layers if isinstance(layers, list) else [layers])


def _read(file: Path) -> dict[str, Any]:
    try:
        config = json.loads(file.read_bytes())
    except FileNotFoundError:
        raise AdapterError(f"{CONFIG_FILE} is missing") from None
    except (OSError, ValueError, RecursionError) as error:
        raise AdapterError(f"{CONFIG_FILE} cannot be read: {error}") from None
    if not isinstance(config, dict):
        raise AdapterError(f"{CONFIG_FILE} is not a JSON object")
    return config


def _is_listed(field: str, modules: Any, path: str) -> bool:
    """A string is a regular expression for the whole path; of a list, one must be the path or its end."""
    if isinstance(modules, str):
        return _compile(field, modules).fullmatch(path) is not None
    if not isinstance(modules, list):
        raise AdapterError(f"{field} is {modules!r}, neither a list nor a string")
    return any(f".{path}".endswith(f".{module}") for module in modules)


def _compile(field: str, pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except re.error as error:
        raise AdapterError(f"{field} has a regular expression that is none, {pattern!r}: {error}") from None


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= MAX_NUMBER
