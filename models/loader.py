"""Reads a safetensors checkpoint into a model: a dumb loop. Which part of a tensor a rank needs, the model's layers say."""

import logging
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from safetensors import SafetensorError, safe_open
from torch import nn

from loray.models.decoder import Decoder
from loray.models.linear import Weight
from loray.models.model_folder import WEIGHTS, weight_files
from loray.models.progress import with_progress

logger = logging.getLogger("loray.loader")
DTYPES = ("F64", "F32", "F16", "BF16")

Layer = tuple[nn.Module, list[tuple[str, Weight]]]  # a module and its weights, by their names in the checkpoint


@runtime_checkable
class Packed(Protocol):
    """A layer that has something to do once its weights are there."""

    def pack(self, has_float8_weights: bool) -> None: ...


class WeightsError(Exception):
    """The checkpoint's tensors are not those of the model; the message names them."""


def load_weights(model: Decoder, folder: Path, has_float8_weights: bool = False) -> int:
    """Fill every weight of the model; returns the bytes read."""
    started = time.perf_counter()
    num_bytes = 0
    with ExitStack() as stack:
        tensors = _open_tensors(folder, stack)
        if _find("lm_head.weight", model, tensors) in tensors and model.lm_head.is_tied:
            model.lm_head.untie()  # what the checkpoint has wins over what its config says, as in transformers
        layers: list[Layer] = [
            (module, [(_find(weight.name, model, tensors), weight) for weight in weights]) for module, weights in _layers(model)
        ]
        names = {name for _, weights in layers for name, _ in weights}
        _check_names(folder, names, set(tensors), model.ignored_tensors)
        for module, weights in with_progress(layers, "loading weights", "layer"):
            for name, weight in weights:
                num_bytes += _read(folder, name, weight, tensors[name])
            if isinstance(module, Packed):
                module.pack(has_float8_weights)
    logger.info("loaded %d tensors, %.2f GB, in %.1f s", len(names), num_bytes / 1e9, time.perf_counter() - started)
    return num_bytes


def held_bytes(model: nn.Module) -> int:
    """What the weights take, in whatever form they are kept."""
    return sum(parameter.nbytes for parameter in model.parameters()) + sum(getattr(layer, "packed_bytes", 0) for layer in model.modules())


def _layers(model: nn.Module) -> Iterator[tuple[nn.Module, list[Weight]]]:
    """Layers that are cut say how; any other parameter is whole and goes by its own name."""
    for path, module in model.named_modules():
        if hasattr(module, "weights"):
            yield module, list(module.weights(path))
        elif own := dict(module.named_parameters(recurse=False)):
            yield module, [Weight(f"{path}.{name}", tuple(p.shape), tuple(map(slice, p.shape)), p) for name, p in own.items()]


def _read(folder: Path, name: str, weight: Weight, file: Any) -> int:
    part = file.get_slice(name)
    if tuple(part.get_shape()) != weight.shape:
        raise WeightsError(f"{folder.name}: {name} has shape {tuple(part.get_shape())}, the model needs {weight.shape}")
    if part.get_dtype() not in DTYPES:
        raise WeightsError(
            f"{folder.name}: {name} has dtype {part.get_dtype()}; only {', '.join(DTYPES)} are read: quantised weights are not"
        )
    values = part[weight.part]  # of the mapped file, only these pages are read
    weight.out.copy_(values)
    return int(values.nbytes)


def _open_tensors(folder: Path, stack: ExitStack) -> dict[str, Any]:
    """Tensor name -> the open file that holds it."""
    tensors = {}
    for file in weight_files(folder) or [WEIGHTS]:
        try:
            opened = stack.enter_context(safe_open(folder / file, "pt"))
        except (SafetensorError, OSError) as error:
            raise WeightsError(f"{folder.name}: cannot read {file}: {error}") from error
        tensors.update(dict.fromkeys(opened.keys(), opened))
    return tensors


def _find(name: str, model: Decoder, tensors: dict[str, Any]) -> str:
    """What this checkpoint calls it."""
    names = (name, name.removeprefix(model.prefix), model.renamed.get(name, name))
    return next((found for found in names if found in tensors), name)


def _check_names(folder: Path, wanted: set[str], found: set[str], ignored: tuple[str, ...]) -> None:
    missing = sorted(wanted - found)
    unexpected = sorted(name for name in found - wanted if not name.endswith(ignored))
    if missing or unexpected:
        reasons = [f"{word} {_first(names)}" for word, names in (("missing", missing), ("unexpected", unexpected)) if names]
        raise WeightsError(f"{folder.name}: the checkpoint does not fit the model: {'; '.join(reasons)}")


def _first(names: list[str], limit: int = 8) -> str:
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more
