"""A model's folder in Hugging Face format: whether it is whole, and what its config says. Reads no weights, only their names."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")
TOKENIZER_SETTINGS = ("tokenizer_config.json", "special_tokens_map.json", "generation_config.json")
WEIGHTS = "model.safetensors"
WEIGHTS_INDEX = "model.safetensors.index.json"
NOT_WEIGHTS = ("consolidated", "adapter_model")  # the same weights under Mistral's own names; a LoRA adapter


class CheckpointError(Exception):
    """The model can't be had; the message is one line that says why and what to do."""


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """What a server must know of a model before its weights are there."""

    num_heads: int
    vocab_size: int
    max_position_embeddings: int | None  # None: the config sets no limit, as with BLOOM's ALiBi


def read_config(folder: Path) -> dict[str, Any]:
    """config.json as it stands."""
    return _read_object(folder / "config.json")


def eos_token_ids(folder: Path) -> frozenset[int]:
    """Every token that ends a text: generation_config.json has the last word, as in Hugging Face's generate."""
    generation = folder / "generation_config.json"
    ids = _read_object(generation).get("eos_token_id") if generation.is_file() else None
    if ids is None:
        ids = read_config(folder).get("eos_token_id")
    ids = [] if ids is None else [ids] if isinstance(ids, int) else ids
    if not isinstance(ids, list) or not all(isinstance(token_id, int) for token_id in ids):
        raise CheckpointError(f"model folder {folder}: eos_token_id is {ids!r}, neither a token nor a list of them")
    return frozenset(ids)


def model_limits(config: dict[str, Any]) -> ModelLimits:
    """From config.json; a family's own word for a thing counts where the usual one is missing."""
    vocab_size = _count(config, "vocab_size")
    if vocab_size is None:
        raise CheckpointError("config.json does not say how many tokens the model knows (vocab_size)")
    positions = _count(config, "max_position_embeddings", "n_positions", "max_seq_len")  # usual, GPT-2's and GPT-J's, MPT's
    return ModelLimits(max_tensor_parallel(config), vocab_size, positions)


def max_tensor_parallel(config: dict[str, Any]) -> int:
    """The attention heads: a rank needs at least one of its own."""
    heads = _count(config, "num_attention_heads", "n_head", "n_heads", "num_heads")  # usual, GPT-2's and BLOOM's, MPT's, GPT-Neo's
    if heads is None:
        raise CheckpointError("config.json does not say how many attention heads the model has (num_attention_heads)")
    return heads


def least_kv_bytes(config: dict[str, Any], num_tokens: int, ranks: int) -> int:
    """Of their keys and values on the rank with most heads, two bytes a number; 0 where the config does not say."""
    heads, layers = _count(config, "num_attention_heads", "n_head"), _count(config, "num_hidden_layers", "n_layer")
    hidden = _count(config, "hidden_size", "n_embd")
    if heads is None or layers is None or hidden is None:
        return 0
    num_keys = -(-(_count(config, "num_key_value_heads") or heads) // ranks) * (_count(config, "head_dim") or hidden // heads)
    return 2 * 2 * layers * num_keys * num_tokens


def check_folder(folder: Path) -> Path:
    """The folder itself when it is a whole checkpoint; otherwise an error that names everything missing."""
    missing = []
    if not (folder / "config.json").is_file():
        missing.append("config.json")
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        missing.append("a tokenizer (tokenizer.json or tokenizer.model)")
    files = weight_files(folder)
    missing.extend(name for name in files or [WEIGHTS] if not (folder / name).is_file())
    if missing:
        raise CheckpointError(f"model folder {folder} lacks {', '.join(missing)}")
    read_config(folder)
    if sum(_num_tensors(folder, name) for name in files) == 0:
        raise CheckpointError(f"model folder {folder}: there is no tensor in {', '.join(files)}")
    return folder


def check_tokenizer(folder: Path) -> None:
    """Raises CheckpointError for a file of it that is broken. What only transformers can read is left to it."""
    for name in TOKENIZER_SETTINGS:
        if (folder / name).is_file():
            _read_object(folder / name)
    eos_token_ids(folder)
    if (folder / "tokenizer.json").is_file():
        import tokenizers  # who only builds the application does not wait for it

        try:
            tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        except Exception as error:  # nothing narrower is raised
            raise CheckpointError(f"model folder {folder}: tokenizer.json is no tokenizer: {one_line(error)}") from error


def weight_files(folder: Path) -> list[str]:
    """The files that hold the weights, in transformers' order of preference: one file, an index; else every file that may be theirs."""
    if (folder / WEIGHTS).is_file():
        return [WEIGHTS]
    index = folder / WEIGHTS_INDEX
    if not index.is_file():
        return sorted(path.name for path in folder.glob("*.safetensors") if not path.name.startswith(NOT_WEIGHTS))
    weight_map = _read_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map or not all(isinstance(file, str) for file in weight_map.values()):
        raise CheckpointError(f"{index} has no weight_map from tensor names to files")
    return sorted(set(weight_map.values()))


def one_line(error: object) -> str:
    return " ".join(str(error).split())


def _num_tensors(folder: Path, name: str) -> int:
    """Reads the header alone; the file's length is checked against it."""
    try:
        with safe_open(folder / name, "numpy") as file:
            return len(file.keys())
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"model folder {folder}: {name} is empty, cut short or no safetensors file ({one_line(error)})") from error


def _count(config: dict[str, Any], *names: str) -> int | None:
    values = (config.get(name) for name in names)
    return next((value for value in values if isinstance(value, int) and value > 0), None)


def _read_object(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} can't be read: {one_line(error)}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} does not hold a JSON object")
    return value
