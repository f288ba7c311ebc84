"""Reads and checks adapter_config.json of a PEFT LoRA folder: what it asks for, module by module. Never opens the weights."""

import json
import math
import re
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from reprlib import Repr
from typing import Any

from loray.models.bounded_patterns import Pattern, PatternBudget, PatternError
from loray.models.end_patterns import EndPatterns

CONFIG_FILE = "adapter_config.json"
MAX_CONFIG_BYTES = 1 << 20
MAX_NUMBER = 1e30  # beyond it a scale is no float32 any more
MAX_NAMES = 4096  # of modules or layers, in one field
MAX_SECONDS = 1.0  # of a processor, for everything that one adapter's patterns are asked
REFUSED_FIELDS = {  # field -> what it is; any value but null, false or empty is refused, see also NULL_FIELDS
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
NULL_FIELDS = {"use_bdlora", "velora_config", "kasa_config", "monteclora_config", "arrow_config"}  # PEFT fills an empty one with defaults
DEFAULTS = {"r": 8, "lora_alpha": 8}  # PEFT's
FLAGS = ("use_dora", "use_rslora", "lora_bias", "ensure_weight_tying")
# Names are PEFT's, which folds the case of some and takes others by their beginning.
PLAIN_INITS = re.compile(r"(?i:gaussian)|eva|orthogonal")  # leave the base model's weights alone
OTHER_INITS = re.compile(r"pissa.*|corda.*|(?i:olora)|loftq|lora_ga", re.DOTALL)  # change them
RANDOM_INITS = (None, False, "orthogonal")  # with the others B is zero
ANY_LAYER = re.compile(r".*?\.[^.]*\.(?P<idx>\d+)\.")

_shortened = Repr()
_shortened.maxstring = _shortened.maxother = 120
shown = _shortened.repr  # a value of a stranger in a message: short, printable, however large and deep


class AdapterError(Exception):
    """The adapter cannot be served; the message names the adapter, the tensor or field, and the reason."""


class FilesChanged(AdapterError):
    """They are not those that were checked: another version may be there now."""


class AdapterConfig:
    """name, below: of a module as PEFT sees it in the model that the adapter was made from."""

    def __init__(self, file: Path) -> None:
        self._fields = DEFAULTS | _read(file)
        self._check()
        self._budget = PatternBudget(MAX_SECONDS)
        targets = self._fields["target_modules"]
        self._is_all_linear = isinstance(targets, str) and targets.lower() == "all-linear"
        self._by_end = {
            field: EndPatterns(self._fields.get(field) or (), partial(self._compile, field, before=r"(.*\.)?(", after=")$"), self._budget)
            for field in ("rank_pattern", "alpha_pattern")
        }
        names = self._fields.get("layers_pattern") or []
        self._patterns = {
            "layers_pattern": [
                self._compile("layers_pattern", name, r"(?:^|.*?\.)", r"\.(?P<idx>\d+)\.")
                for name in ([names] if isinstance(names, str) else names)
            ]
        }
        self._endings: dict[str, tuple[str, ...]] = {}
        for field in ("target_modules", "exclude_modules"):
            modules = self._fields.get(field) or []
            if isinstance(modules, str):
                self._patterns[field] = [self._compile(field, modules, is_full=True)]
            else:
                self._endings[field] = tuple(f".{module}" for module in modules)
        self.use_dora, self._use_rslora, self.lora_bias, self.ensure_weight_tying = (bool(self._fields.get(flag)) for flag in FLAGS)

    def rank(self, name: str) -> int:
        rank = self._by_pattern("rank_pattern", name, self._fields["r"])
        if type(rank) is not int or rank < 1:
            raise AdapterError(f"the rank of {name} is {shown(rank)}, not a positive whole number")
        return rank

    def scale(self, name: str, rank: int) -> float:
        alpha = self._by_pattern("alpha_pattern", name, self._fields["lora_alpha"])
        return float(alpha / (math.sqrt(rank) if self._use_rslora else rank))

    def is_targeted(self, name: str, is_linear: bool) -> bool:
        """Whether PEFT would give this module LoRA; tensors of others it leaves unread, so they must not change the numbers here.
        is_linear: neither the embedding nor the head."""
        if self._is_listed("exclude_modules", name):
            return False
        if self._is_all_linear:
            return is_linear
        if not self._is_listed("target_modules", name):
            return False
        targets = self._fields["target_modules"]
        return isinstance(targets, str) or name in targets or self._is_in_layers(name)

    @property
    def fills_at_random(self) -> bool:
        """Whether PEFT gives what it targets, and what has no tensors, numbers that change the model's."""
        return self._fields.get("init_lora_weights", True) in RANDOM_INITS

    def check_has_targets(self, names: Collection[str]) -> None:
        """names: of the base model's modules that it targets. Trained tokens and biases need none."""
        if not names and self._fields.get("bias", "none") == "none" and not self._fields.get("trainable_token_indices"):
            targets = shown(self._fields["target_modules"])
            raise AdapterError(f"target_modules is {targets}: the base model has no such module that can carry LoRA")

    def token_ids(self, path: str, is_embedding: bool) -> tuple[int, ...]:
        """Tokens whose embeddings were trained, of the embedding or head at this path. A list without a name means the embedding."""
        indices = self._fields.get("trainable_token_indices") or []
        if isinstance(indices, dict):
            indices = next((ids for key, ids in indices.items() if f".{path}".endswith(f".{key}")), [])
        elif not is_embedding:
            indices = []
        return tuple(indices)

    @property
    def has_trained_tokens(self) -> bool:
        indices = self._fields.get("trainable_token_indices") or []
        return any(indices.values()) if isinstance(indices, dict) else bool(indices)

    def check_names_embeddings(self, paths: Collection[str]) -> None:
        """paths: of the embedding and the head."""
        indices = self._fields.get("trainable_token_indices")
        for key in indices if isinstance(indices, dict) else ():
            if not any(f".{path}".endswith(f".{key}") for path in paths):
                raise AdapterError(f"trainable_token_indices names {shown(key)}, which is no embedding of the base model")

    def _check(self) -> None:
        fields = self._fields
        if fields.get("peft_type") != "LORA":
            raise AdapterError(f"peft_type is {shown(fields.get('peft_type'))}, only 'LORA' can be served")
        if fields.get("bias", "none") not in ("none", "lora_only", "all"):
            raise AdapterError(f"bias is {shown(fields['bias'])}, not 'none', 'lora_only' or 'all'")
        for field, meaning in REFUSED_FIELDS.items():
            if fields.get(field) or (field in NULL_FIELDS and fields.get(field) is not None):
                raise AdapterError(f"{field} is {shown(fields[field])}: {meaning} is not supported")
        for field in FLAGS:
            if fields.get(field) not in (None, True, False):
                raise AdapterError(f"{field} is {shown(fields[field])}, neither true nor false")
        _check_init(fields.get("init_lora_weights", True))
        for field in ("r", "lora_alpha"):
            if not _is_number(fields.get(field)):
                raise AdapterError(f"{field} is {shown(fields.get(field))}, not a number")
        _check_names(fields)
        _check_together(fields)
        _check_token_ids(fields.get("trainable_token_indices"))

    def _compile(self, field: str, pattern: str, before: str = "", after: str = "", is_full: bool = False) -> Pattern:
        try:
            return self._budget.compile(pattern, before, after, is_full)
        except PatternError as error:
            raise AdapterError(f"{field} has a regular expression, {shown(pattern)}, that {error}") from None

    def _first(self, field: str, name: str) -> tuple[int, Any] | None:
        with _told_of(field):
            return self._budget.first(self._patterns.get(field, ()), name)

    def _by_pattern(self, field: str, name: str, default: Any) -> Any:
        """The first key that matches the end of the name, as PEFT does it."""
        with _told_of(field):
            number = self._by_end[field].first(name)
        return default if number is None else list(self._fields[field].values())[number]

    def _is_listed(self, field: str, name: str) -> bool:
        """A string is a regular expression for the whole name; of a list, one must be the name or its end."""
        if field in self._endings:
            return f".{name}".endswith(self._endings[field])
        return self._first(field, name) is not None

    def _is_in_layers(self, name: str) -> bool:
        layers = self._fields.get("layers_to_transform")
        if layers is None or layers == []:
            return True
        if self._patterns["layers_pattern"]:
            found = self._first("layers_pattern", name)
            match = found[1] if found else None
        else:
            match = ANY_LAYER.match(name)
        index = match["idx"] if match else None  # none where another branch of the pattern matched
        return index is not None and int(index) in (layers if isinstance(layers, list) else [layers])


@contextmanager
def _told_of(field: str) -> Iterator[None]:
    try:
        yield
    except PatternError as error:
        raise AdapterError(f"{field} {error}: the regular expressions of a config may take {MAX_SECONDS:g} s") from None


def check_config_size(num_bytes: int) -> None:
    if num_bytes > MAX_CONFIG_BYTES:
        raise AdapterError(f"{CONFIG_FILE} has {num_bytes} bytes, more than {MAX_CONFIG_BYTES}")


def _read(file: Path) -> dict[str, Any]:
    try:
        if not file.is_file():
            raise AdapterError(f"{CONFIG_FILE} is missing, or no file")
        check_config_size(file.stat().st_size)
        config = json.loads(file.read_bytes())
    except OSError as error:
        raise AdapterError(f"{CONFIG_FILE} cannot be read: {error.strerror}") from None
    except RecursionError:
        raise AdapterError(f"{CONFIG_FILE} cannot be read: it is nested too deeply") from None
    except ValueError as error:
        raise AdapterError(f"{CONFIG_FILE} cannot be read: {error}") from None
    if not isinstance(config, dict):
        raise AdapterError(f"{CONFIG_FILE} is not a JSON object")
    return config


def _check_init(init: Any) -> None:
    if init is not None and not isinstance(init, str | bool):
        raise AdapterError(f"init_lora_weights is {shown(init)}, neither a name nor true or false")
    if isinstance(init, str) and not PLAIN_INITS.fullmatch(init):
        claim = "it" if OTHER_INITS.fullmatch(init) else "it is not known whether it"
        raise AdapterError(
            f"init_lora_weights is {shown(init)}: {claim} changes the base model's weights; save the adapter as plain LoRA first"
        )


def _check_names(fields: dict[str, Any]) -> None:
    """Of modules and layers."""
    if fields.get("target_modules") is None:
        raise AdapterError("target_modules is null: PEFT would guess the modules from the architecture; name them, or say 'all-linear'")
    for field in ("target_modules", "exclude_modules", "layers_pattern"):
        names = fields.get(field)
        if names is not None and not isinstance(names, str | list):
            raise AdapterError(f"{field} is {shown(names)}, neither a list nor a string")
        if isinstance(names, list) and not all(isinstance(name, str) for name in names):
            raise AdapterError(f"{field} is {shown(names)}, a list not only of strings")
    for field in ("rank_pattern", "alpha_pattern"):
        pattern = fields.get(field)
        if pattern is not None and not (isinstance(pattern, dict) and all(_is_number(value) for value in pattern.values())):
            raise AdapterError(f"{field} is {shown(pattern)}, not a map from module names to numbers")
    for field in ("target_modules", "exclude_modules", "layers_pattern", "rank_pattern", "alpha_pattern", "layers_to_transform"):
        names = fields.get(field)
        if isinstance(names, list | dict) and len(names) > MAX_NAMES:
            raise AdapterError(f"{field} has {len(names)} entries, more than {MAX_NAMES}")
    layers = fields.get("layers_to_transform")
    if layers is not None and not all(type(layer) is int for layer in (layers if isinstance(layers, list) else [layers])):
        raise AdapterError(f"layers_to_transform is {shown(layers)}, neither a whole number nor a list of them")


def _check_together(fields: dict[str, Any]) -> None:
    """What PEFT itself refuses."""
    layers, pattern, has_bias = fields.get("layers_to_transform"), fields.get("layers_pattern"), fields.get("lora_bias")
    if isinstance(fields["target_modules"], str) and (layers is not None or pattern is not None):
        raise AdapterError("PEFT refuses layers_to_transform and layers_pattern where target_modules is a string")
    if pattern and layers is None:
        raise AdapterError("PEFT refuses layers_pattern without layers_to_transform")
    if has_bias and fields.get("use_dora"):
        raise AdapterError("PEFT refuses lora_bias together with use_dora")
    if has_bias and not isinstance(init := fields.get("init_lora_weights", True), bool):
        raise AdapterError(f"PEFT refuses lora_bias where init_lora_weights is {shown(init)}")


def _check_token_ids(indices: Any) -> None:
    lists = list(indices.values()) if isinstance(indices, dict) else [[] if indices is None else indices]
    if not all(isinstance(ids, list) and all(type(token_id) is int for token_id in ids) for ids in lists):
        raise AdapterError(f"trainable_token_indices is {shown(indices)}, which holds no lists of whole numbers")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= MAX_NUMBER
