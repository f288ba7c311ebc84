"""Reads and checks a PEFT LoRA folder: its config and the names and shapes of its tensors. Never reads a weight, never imports torch.

Whatever would make the served model differ from what PEFT computes is refused here, by name; what only the base model's weights can
tell, the ranks refuse when they read the tensors.
"""

import re
from dataclasses import dataclass
from math import prod
from pathlib import Path

from loray.models.adapter_config import CONFIG_FILE, AdapterConfig, AdapterError, shown
from loray.models.adapter_header import MAX_HEADER_BYTES, SIZE_BYTES, WEIGHTS_FILE, TensorPlace, read_places

__all__ = ["EMBEDDINGS", "HEAD", "PAGE_RANK", "WEIGHTS_FILE", "AdapterError", "AdapterModule", "AdapterSpec", "TrainedTokens"]
__all__ += ["Shapes", "most_weights_bytes", "no_tokens", "rank_in_config", "read_adapter", "signature"]

PAGE_RANK = 8  # LoRA ranks in one page of the pool
EMBEDDINGS = ("embed_tokens", "wte", "embed_in")  # last names of modules whose input is a token
HEAD = "lm_head"
ADAPTER = r"(?:\.(?P<adapter>[^.]+))??"  # PEFT leaves out the adapter's name, others do not
KINDS = {  # of a module's tensors
    "lora_A": rf"lora_A{ADAPTER}\.weight",
    "lora_B": rf"lora_B{ADAPTER}\.weight",
    "lora_embedding_A": rf"lora_embedding_A{ADAPTER}",
    "lora_embedding_B": rf"lora_embedding_B{ADAPTER}",
    "bias of lora_B": rf"lora_B{ADAPTER}\.bias",
    "magnitude": rf"lora_magnitude_vector{ADAPTER}(\.weight)?",
    "trained tokens": rf"token_adapter\.trainable_tokens_delta{ADAPTER}",
    "weight under tokens": r"token_adapter\.base_layer\.weight",  # before what its end would match
    "bias under LoRA": r"base_layer\.bias",
    "weight under LoRA": r"base_layer\.weight",
    "bias": r"bias",
    "weight": r"weight",
}
LORA = {"lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B", "bias of lora_B", "magnitude"}
# By kind, what the module has where PEFT reads it. Copies are of the embedding and the head.
BIASES = {"bias under LoRA": "LoRA", "bias": "no LoRA"}
COPIES = {"weight under tokens": "trained tokens", "weight under LoRA": "LoRA", "weight": "neither LoRA nor trained tokens"}
BYTES_OF_FLOAT = 4
TENSOR_NAMES = {kind: re.compile(rf"(?P<module>.+?)\.{ending}") for kind, ending in KINDS.items()}

Shapes = dict[str, tuple[int, int]]
Tensors = dict[str, str]  # kind -> name, of one module
Names = dict[str, str]  # of modules with LoRA, by path: what the adapter's own model calls them, which is what the config's patterns mean


@dataclass(frozen=True, slots=True)
class AdapterModule:
    """LoRA on one linear: y += scale * B A x. On an embedding, x is a token's place in the vocabulary, as a vector of one 1."""

    a_name: str  # tensor [rank, in_features]
    b_name: str  # tensor [out_features, rank]
    rank: int
    scale: float
    b_bias_name: str = ""  # tensor [out_features], scaled as B is; "" = none
    magnitude_name: str = ""  # tensor [out_features], DoRA's lengths of W's rows; "" = plain LoRA


@dataclass(frozen=True, slots=True)
class TrainedTokens:
    """Rows of an embedding or head that replace the base model's."""

    name: str  # tensor [tokens, hidden_size]
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class AdapterSpec:
    """Everything by module path in the base model."""

    rank: int  # the largest of its linears', at least 1: what its pages must hold
    modules: dict[str, AdapterModule]
    beyond_pages: frozenset[str]  # those modules that are no linears: the embedding and the head
    biases: dict[str, str]  # tensor [out_features] that replaces the linear's own
    tokens: dict[str, TrainedTokens]
    has_same_tokens: bool  # for the embedding and the head: where these are tied, the file has the embedding's alone
    copies: dict[str, str]  # tensor that must be the base model's own weight: PEFT saves it beside LoRA on it, or when it is told to
    extra_bytes: int  # at most, of what a rank keeps of it beside its pages
    places: dict[str, TensorPlace]  # of all its tensors, by their names


def read_adapter(folder: Path, lora_shapes: Shapes) -> AdapterSpec:
    """lora_shapes: module path -> (in_features, out_features) of all that can carry LoRA, linears first. A model whose embedding is
    not among them is one that transformers runs: it takes LoRA and biases on linears."""
    try:
        config = _read_config(folder, lora_shapes)
        places = read_places(folder)
        shapes = {name: place.shape for name, place in places.items()}
        modules, names = _by_module(shapes, lora_shapes, config)
        reader = _Reader(config, names, shapes, lora_shapes)
        copies = {path: reader.copy(path, tensors) for path, tensors in modules.items() if COPIES.keys() & tensors.keys()}
        loras = {path: reader.module(path, tensors) for path, tensors in modules.items() if LORA & tensors.keys()}
        biases = {path: reader.bias(path, tensors) for path, tensors in modules.items() if BIASES.keys() & tensors.keys()}
        tokens = {path: reader.tokens(path, tensors) for path, tensors in modules.items() if "trained tokens" in tensors}
        has_same_tokens = reader.has_same_tokens(tokens)
        _check_is_whole(config, names, lora_shapes)
        beyond_pages = {path for path in loras if not _is_linear(path)}
        if tokens and beyond_pages:
            raise AdapterError("trainable_token_indices together with LoRA on the embedding or the head is not supported")
    except AdapterError as error:
        raise AdapterError(f"adapter {folder.name!r}: {error}") from None
    extra_bytes = sum(_extra_bytes(path, tensors, shapes) for path, tensors in modules.items())
    rank = max((module.rank for path, module in loras.items() if path not in beyond_pages), default=1)
    return AdapterSpec(rank, loras, frozenset(beyond_pages), biases, tokens, has_same_tokens, copies, extra_bytes, places)


def rank_in_config(folder: Path, lora_shapes: Shapes) -> int:
    """As `read_adapter` would find it, from the config alone: what is refused for that need not be fetched whole. Raises AdapterError."""
    config = _read_config(folder, lora_shapes)
    model = next(iter(lora_shapes), "").partition(".")[0]
    names: Names = {}
    for path in lora_shapes:
        for name in (path, path.removeprefix(f"{model}.")):  # of the whole model, of the bare one
            if path not in names and config.is_targeted(name, _is_linear(path)):
                names[path] = name
    config.check_has_targets(names)
    return max((config.rank(name) for path, name in names.items() if _is_linear(path)), default=1)


def most_weights_bytes(lora_shapes: Shapes, num_pages: int, extra_bytes: int) -> int:
    """Of the file of an adapter with so many pages and so much beside them; copies of the embedding and the head may be in it too."""
    rows = sum(sum(shape) for path, shape in lora_shapes.items() if _is_linear(path))
    copies = sum(prod(shape) for path, shape in lora_shapes.items() if not _is_linear(path))
    return SIZE_BYTES + MAX_HEADER_BYTES + BYTES_OF_FLOAT * (num_pages * PAGE_RANK * rows + copies) + extra_bytes


def signature(folder: Path) -> str:
    """Changes whenever one of the adapter's files does. The time of its last modification alone does not: archives bring their own."""
    try:
        stats = [(folder / name).stat() for name in (CONFIG_FILE, WEIGHTS_FILE) if (folder / name).exists()]
    except OSError as error:
        raise AdapterError(f"adapter {folder.name!r}: {error.strerror}") from error
    return ",".join(f"{stat.st_ino}-{stat.st_size}-{stat.st_mtime_ns}-{stat.st_ctime_ns}" for stat in stats)


def _read_config(folder: Path, lora_shapes: Shapes) -> AdapterConfig:
    config = AdapterConfig(folder / CONFIG_FILE)
    if not any(_is_embedding(path) for path in lora_shapes):
        if config.use_dora:
            raise AdapterError("use_dora: DoRA is not supported on a model that transformers runs")
        if config.has_trained_tokens:
            raise AdapterError("trainable_token_indices: trained tokens are not supported on a model that transformers runs")
    embeddings = [path for path in lora_shapes if not _is_linear(path)]
    for path in embeddings:
        _check_token_ids(config.token_ids(path, _is_embedding(path)), _vocab_size(path, lora_shapes))
    config.check_names_embeddings(embeddings)
    return config


def no_tokens(path: str) -> AdapterError:
    return AdapterError(f"trainable_token_indices names tokens of {path}, but they are not among the tensors")


def _check_is_whole(config: AdapterConfig, names: Names, lora_shapes: Shapes) -> None:
    """names: of the modules that have tensors, all as the whole model calls them or as the bare one does."""
    is_bare = any(name != path for path, name in names.items())
    prefix = next(iter(lora_shapes), "").partition(".")[0] + "." if is_bare else ""
    for path in lora_shapes if config.fills_at_random else ():
        if path not in names and path.startswith(prefix) and config.is_targeted(path.removeprefix(prefix), _is_linear(path)):
            raise AdapterError(f"{path} has no tensors, though the config targets it: PEFT would fill them at random")


def _check_token_ids(token_ids: tuple[int, ...], vocab_size: int) -> None:
    if any(not 0 <= token_id < vocab_size for token_id in token_ids):
        raise AdapterError(
            f"trainable_token_indices is {shown(token_ids)}, the base model has {vocab_size}: added tokens are not supported"
        )
    if len(set(token_ids)) < len(token_ids):
        raise AdapterError("trainable_token_indices names a token twice")


def _vocab_size(path: str, lora_shapes: Shapes) -> int:
    """Of the embedding or the head at this path."""
    return lora_shapes[path][0 if _is_embedding(path) else 1]


def _is_embedding(path: str) -> bool:
    return path.rpartition(".")[2] in EMBEDDINGS


def _is_linear(path: str) -> bool:
    return not _is_embedding(path) and path != HEAD


def _extra_bytes(path: str, tensors: Tensors, shapes: dict[str, tuple[int, ...]]) -> int:
    """As float32, the widest that a rank keeps; of a magnitude twice, for DoRA has the lengths of the rows beside it."""
    in_pages = {"lora_A", "lora_B"} if _is_linear(path) else set()
    kept = [kind for kind in tensors if kind not in in_pages.union(COPIES)]
    return sum(prod(shapes[tensors[kind]]) * BYTES_OF_FLOAT * (2 if kind == "magnitude" else 1) for kind in kept)


def _by_module(shapes: dict[str, tuple[int, ...]], lora_shapes: Shapes, config: AdapterConfig) -> tuple[dict[str, Tensors], Names]:
    modules: dict[str, Tensors] = {}
    names: Names = {}
    owners: dict[str, str] = {}  # name of an adapter -> a tensor of it
    for tensor in shapes:
        kind, module, adapter = _kind(tensor)
        path = _module_path(module, lora_shapes)
        if kind == "weight" and (path is None or _is_linear(path)):
            raise AdapterError(
                f"tensor {tensor} replaces a weight of the base model: modules trained as a whole and added tokens are not supported"
            )
        if path is None:
            raise AdapterError(f"tensor {tensor}: the base model has no module {module!r} that can carry LoRA{_hint(kind, module)}")
        if kind in LORA and path not in names:
            names[path] = _targeted_name(tensor, module, path, config)
        tensors = modules.setdefault(path, {})
        if kind in tensors:
            raise AdapterError(f"tensors {tensors[kind]} and {tensor} are both {kind} of {path}")
        tensors[kind] = tensor
        if adapter:
            owners.setdefault(adapter, tensor)
    if len(owners) > 1:
        one, other, *_ = owners.values()
        raise AdapterError(f"tensors {one} and {other} are of adapters with different names: PEFT would read one of them only")
    return modules, names


def _targeted_name(tensor: str, module: str, path: str, config: AdapterConfig) -> str:
    for name in (module.removeprefix("base_model.model."), path):
        if config.is_targeted(name, _is_linear(path)):
            return name
    if config.ensure_weight_tying and not _is_linear(path):
        raise _tied(path)
    raise AdapterError(f"tensor {tensor}: the config does not target {path}, so PEFT would not read it")


def _tied(path: str) -> AdapterError:
    return AdapterError(f"ensure_weight_tying is set: LoRA on {path} shared with what is tied to it is not supported")


def _kind(name: str) -> tuple[str, str, str]:
    """What a tensor is, of which module, and of which adapter, where its name says that."""
    for kind, pattern in TENSOR_NAMES.items():
        if match := pattern.fullmatch(name):
            return kind, match["module"], match.groupdict().get("adapter") or ""
    raise AdapterError(f"tensor {name} is not supported: it is no part of LoRA on a linear, an embedding or the head")


def _hint(kind: str, module: str) -> str:
    if kind == "bias":
        return ": trained biases of other modules than linears are not supported"
    if kind in ("lora_embedding_A", "lora_embedding_B", "trained tokens") or module.endswith(HEAD):
        return ": LoRA on the embedding or the head is not supported for it"
    return ""


def _module_path(name: str, lora_shapes: Shapes) -> str | None:
    """Adapters made from the bare model leave out what the whole model calls it ("model", "transformer")."""
    bare = name.removeprefix("base_model.model.")
    model = next(iter(lora_shapes), "").partition(".")[0]
    return next((path for path in (bare, name, f"{model}.{bare}") if path in lora_shapes), None)


class _Reader:
    """Checks the tensors of one module after another against the config and the base model."""

    def __init__(self, config: AdapterConfig, names: Names, shapes: dict[str, tuple[int, ...]], lora_shapes: Shapes) -> None:
        self._config, self._names, self._shapes, self._lora_shapes = config, names, shapes, lora_shapes

    def module(self, path: str, tensors: Tensors) -> AdapterModule:
        config, (inputs, outputs) = self._config, self._lora_shapes[path]
        a, b = ("lora_embedding_A", "lora_embedding_B") if _is_embedding(path) else ("lora_A", "lora_B")
        self._check_kinds(path, tensors, a, b)
        rank = config.rank(self._names[path])
        scale = config.scale(self._names[path], rank)
        self._check_shape(path, tensors[a], (rank, inputs))
        self._check_shape(path, tensors[b], (outputs, rank))
        for kind in ("bias of lora_B", "magnitude"):
            if kind in tensors:
                self._check_shape(path, tensors[kind], (outputs,))
        return AdapterModule(tensors[a], tensors[b], rank, scale, tensors.get("bias of lora_B", ""), tensors.get("magnitude", ""))

    def bias(self, path: str, tensors: Tensors) -> str:
        """PEFT puts a module with LoRA around the base model's, whose bias it finds there and nowhere else."""
        name = self._read_one(path, tensors, "bias under LoRA" if self._has_lora(path) else "bias", BIASES)
        if not _is_linear(path):
            raise AdapterError(f"tensor {name}: {path} has no bias")
        self._check_shape(path, name, self._lora_shapes[path][1:])
        return name

    def tokens(self, path: str, tensors: Tensors) -> TrainedTokens:
        name, token_ids = tensors["trained tokens"], self._config.token_ids(path, _is_embedding(path))
        if _is_linear(path):
            raise AdapterError(f"tensor {name}: {path} has no tokens")
        if not token_ids:
            raise AdapterError(f"tensor {name}: trainable_token_indices names no tokens of {path}, so PEFT would not read it")
        hidden_size = self._lora_shapes[path][1 if _is_embedding(path) else 0]
        self._check_shape(path, name, (len(token_ids), hidden_size))
        return TrainedTokens(name, token_ids)

    def has_same_tokens(self, trained: dict[str, TrainedTokens]) -> bool:
        """Whether the config names the same for the embedding and the head; only the ranks know if these are tied."""
        embeddings = [path for path in self._lora_shapes if not _is_linear(path)]
        token_ids = {path: self._config.token_ids(path, _is_embedding(path)) for path in embeddings}
        of_head = token_ids.get(HEAD, ())
        has_same = of_head != () and any(ids == of_head for path, ids in token_ids.items() if path != HEAD)
        for path, ids in token_ids.items():
            if ids and path not in trained and not (path == HEAD and has_same):
                raise no_tokens(path)
        return has_same

    def copy(self, path: str, tensors: Tensors) -> str:
        """PEFT puts trained tokens around the base model's module too; around a tied head also the embedding's."""
        has_tokens = "trained tokens" in tensors or (path == HEAD and "weight under tokens" in tensors and self._config.has_trained_tokens)
        kind = "weight under LoRA" if self._has_lora(path) else "weight under tokens" if has_tokens else "weight"
        name = self._read_one(path, tensors, kind, COPIES)
        if _is_linear(path):
            raise AdapterError(f"tensor {name}: a replaced weight of the base model is not supported")
        inputs, outputs = self._lora_shapes[path]
        self._check_shape(path, name, (inputs, outputs) if _is_embedding(path) else (outputs, inputs))
        return name

    def _has_lora(self, path: str) -> bool:
        """As PEFT's model has it, whether or not there are tensors of it."""
        return path in self._names or self._config.is_targeted(path, _is_linear(path))

    def _read_one(self, path: str, tensors: Tensors, kind: str, kinds: dict[str, str]) -> str:
        for other in kinds:
            if other in tensors and other != kind:
                raise AdapterError(f"tensor {tensors[other]}: PEFT would not read it, for {path} has {kinds[kind]}")
        return tensors[kind]

    def _check_kinds(self, path: str, tensors: Tensors, a: str, b: str) -> None:
        for present, absent in ((a, b), (b, a)):
            if absent not in tensors:
                found = tensors.get(present) or next(iter(tensors.values()))
                raise AdapterError(f"module {path} has {found} but no {absent}")
        if a == "lora_A" and "bias of lora_B" not in tensors and self._config.lora_bias and self._config.fills_at_random:
            raise AdapterError(f"lora_bias is set, but module {path} has no bias of lora_B: PEFT would fill it at random")
        foreign = LORA - {a, b, "magnitude"} - ({"bias of lora_B"} if a == "lora_A" else set())
        for kind in foreign & tensors.keys():
            raise AdapterError(f"tensor {tensors[kind]}: {path} has {a} and {b}, so PEFT would not read it")
        if "magnitude" in tensors and not self._config.use_dora:
            raise AdapterError(f"tensor {tensors['magnitude']}: use_dora is not set, so PEFT would not read it")
        if "magnitude" not in tensors and self._config.use_dora:
            raise AdapterError(f"use_dora is set, but module {path} has no lora_magnitude_vector")
        if "bias of lora_B" in tensors and not self._config.lora_bias:
            raise AdapterError(f"tensor {tensors['bias of lora_B']}: lora_bias is not set, so PEFT would not read it")
        if self._config.ensure_weight_tying and not _is_linear(path):
            raise _tied(path)

    def _check_shape(self, path: str, name: str, wanted: tuple[int, ...]) -> None:
        if (shape := self._shapes[name]) != wanted:
            vocab_size = None if _is_linear(path) else _vocab_size(path, self._lora_shapes)
            is_resized = vocab_size in wanted and vocab_size not in shape
            hint = ": the adapter was made with a resized vocabulary, which is not supported" if is_resized else ""
            raise AdapterError(f"tensor {name} has shape {shape}, the base model and the config need {wanted}{hint}")
