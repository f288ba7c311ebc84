"""Several LoRA adapters as one: reads PEFT folders, writes a plain PEFT folder. Knows no requests, and not where adapters come from.

linear is exact: the merged delta is sum(weight * scale * B A). ties and dare work on A and B apart, as PEFT's add_weighted_adapter does.
"""

import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from loray.models.adapter import AdapterError, AdapterSpec, read_adapter, signature
from loray.models.adapter_config import CONFIG_FILE, FilesChanged
from loray.models.adapter_header import WEIGHTS_FILE
from loray.models.bounded_patterns import MAX_PATTERN_LEN
from loray.models.file_tensors import FileTensors

TENSOR_KINDS = {  # part of a tensor's name -> what an adapter with such a tensor has
    "lora_magnitude_vector": "DoRA",
    "lora_embedding_": "LoRA on embeddings",
    "trainable_tokens": "trained token embeddings",
    "lora_B.": "a bias on LoRA's B",
    ".bias": "a trained bias",
}


@dataclass(frozen=True, slots=True)
class MergeMethod:
    """`seed` chooses what dare drops: the same seed and adapters always give the same files."""

    strategy: Literal["linear", "ties", "dare_linear", "dare_ties"] = "linear"
    density: float = 1.0  # share of the values that ties and dare keep
    majority_sign: Literal["total", "frequency"] = "total"  # ties and dare_ties elect a sign by sum or by count
    seed: int = 0


@dataclass(frozen=True, slots=True)
class _Source:
    spec: AdapterSpec
    tensors: FileTensors
    weight: float


@dataclass(frozen=True, slots=True)
class _Part:
    """What one adapter adds to one linear: factor * B A."""

    a: Tensor  # [rank, in_features] float32
    b: Tensor  # [out_features, rank] float32
    factor: float  # weight * scale


def merge_adapters(
    folders: Sequence[Path], weights: Sequence[float], method: MergeMethod, lora_shapes: dict[str, tuple[int, int]], out: Path
) -> None:
    """Writes `out`, an adapter of scale 1, whole or not at all; a folder that is there already is taken for the same merge and kept.

    Ranks and modules of the adapters may differ. linear then concatenates along the rank. PEFT refuses ties and dare over different
    ranks; here the smaller ones are filled up with zeros, after pruning, and zeros have no vote. As in PEFT, an adapter counts only
    where it has the module, and one adapter alone is never pruned.
    """
    if len(folders) == 1:
        method = MergeMethod()
    generator = torch.Generator().manual_seed(method.seed)
    merged: dict[str, tuple[Tensor, Tensor]] = {}
    sources = [_read(folder, weight, lora_shapes) for folder, weight in zip(folders, weights, strict=True)]
    for path in lora_shapes:  # the model's own order, which is also that of PEFT's draws
        if parts := [_part(source, path) for source in sources if path in source.spec.modules]:
            merged[path] = _merge_linear(parts) if method.strategy == "linear" else _merge_sparse(parts, method, generator)
            if not all(bool(matrix.isfinite().all()) for matrix in merged[path]):
                raise AdapterError(f"merged adapters {[folder.name for folder in folders]}: {path} has values that float32 cannot hold")
    _write(merged, out)


def _read(folder: Path, weight: float, lora_shapes: dict[str, tuple[int, int]]) -> _Source:
    before = signature(folder)
    try:
        spec = read_adapter(folder, lora_shapes)
        _check_is_plain(folder, spec)
        tensors = FileTensors(folder / WEIGHTS_FILE, spec.places)
    except (AdapterError, OSError) as error:
        _check_unchanged(folder, before)
        if isinstance(error, AdapterError):
            raise
        raise AdapterError(f"adapter {folder.name!r}: {WEIGHTS_FILE} cannot be read: {_reason(error)}") from error
    _check_unchanged(folder, before)
    return _Source(spec, tensors, weight)


def _check_unchanged(folder: Path, before: str) -> None:
    if signature(folder) != before:
        raise FilesChanged(f"adapter {folder.name!r}: its files changed while they were read")


def _check_is_plain(folder: Path, spec: AdapterSpec) -> None:
    plain = {name for module in spec.modules.values() for name in (module.a_name, module.b_name) if "lora_embedding_" not in name}
    if others := sorted(spec.places.keys() - plain):
        known = ((name, kind) for part, kind in TENSOR_KINDS.items() for name in others if part in name)
        name, kind = next(known, (others[0], "a saved copy of the base model"))
        raise AdapterError(f"adapter {folder.name!r}: tensor {name} belongs to {kind}; only plain LoRA on linears can be merged")


def _reason(error: Exception) -> str:
    """Without the path that the system or safetensors adds."""
    return (isinstance(error, OSError) and error.strerror) or str(error)


def _part(source: _Source, path: str) -> _Part:
    module = source.spec.modules[path]
    a, b = (source.tensors[name].float() for name in (module.a_name, module.b_name))
    return _Part(a, b, source.weight * module.scale)


def _merge_linear(parts: Sequence[_Part]) -> tuple[Tensor, Tensor]:
    return torch.cat([part.a for part in parts]), torch.cat([part.b * part.factor for part in parts], 1)


def _merge_sparse(parts: Sequence[_Part], method: MergeMethod, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Each side is scaled by the root of the factor. The factor's sign goes to A alone, or it would vanish in the product."""
    roots = [math.sqrt(abs(part.factor)) for part in parts]
    signed_roots = [math.copysign(root, part.factor) for root, part in zip(roots, parts, strict=True)]
    a = _combine([part.a for part in parts], signed_roots, method, generator)
    b = _combine([part.b for part in parts], roots, method, generator)
    return a, b


def _combine(matrices: Sequence[Tensor], factors: Sequence[float], method: MergeMethod, generator: torch.Generator) -> Tensor:
    """dare_linear: the weighted sum of the pruned matrices. ties, dare_ties: the mean over those that have the elected sign."""
    values = _stacked([_pruned(matrix, method, generator) for matrix in matrices])
    weighted = values * torch.tensor(factors)[:, None, None]
    if method.strategy == "dare_linear":
        return weighted.sum(0)
    signs = values.sign()
    votes = (values if method.majority_sign == "total" else signs).sum(0)
    has_elected_sign = signs == torch.where(votes >= 0, 1.0, -1.0)  # [num_adapters, rows, columns]
    return (weighted * has_elected_sign).sum(0) / has_elected_sign.sum(0).clamp(min=1)


def _pruned(matrix: Tensor, method: MergeMethod, generator: torch.Generator) -> Tensor:
    """ties keeps the largest values; dare keeps any, and scales them up to the same expectation."""
    if method.density >= 1:
        return matrix
    if method.strategy == "ties":
        kept = matrix.abs().flatten().topk(int(method.density * matrix.numel())).indices
        return matrix * torch.zeros(matrix.numel()).index_fill(0, kept, 1).view_as(matrix)
    return matrix * torch.bernoulli(torch.full_like(matrix, method.density), generator=generator) / method.density


def _stacked(matrices: Sequence[Tensor]) -> Tensor:
    """[num_matrices, most rows, most columns], with zeros where a matrix has none."""
    rows, columns = (max(matrix.shape[axis] for matrix in matrices) for axis in (0, 1))
    return torch.stack([torch.nn.functional.pad(m, (0, columns - m.shape[1], 0, rows - m.shape[0])) for m in matrices])


def _write(merged: Mapping[str, tuple[Tensor, Tensor]], out: Path) -> None:
    """By way of a folder beside it, so that nobody ever sees half an adapter."""
    sides = (
        (f"base_model.model.{path}.lora_{side}.weight", m) for path, pair in merged.items() for side, m in zip("AB", pair, strict=True)
    )
    tensors = {name: matrix.contiguous() for name, matrix in sides}
    config = _config({path: len(a) for path, (a, _) in merged.items()})
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as scratch:
            folder = Path(scratch) / out.name
            folder.mkdir()
            (folder / CONFIG_FILE).write_text(json.dumps(config, indent=2), encoding="utf-8")
            save_file(tensors, folder / WEIGHTS_FILE, {"format": "pt"})
            folder.rename(out)
    except (SafetensorError, OSError) as error:
        if not out.exists():  # else another process was faster with the same merge
            raise AdapterError(f"merged adapter {out.name!r} cannot be written: {_reason(error)}") from error


def _joined(paths: Iterable[str]) -> Iterator[str]:
    """Patterns that take these paths, none longer than a pattern may be."""
    pattern = ""
    for path in map(re.escape, paths):
        if pattern and len(pattern) + 1 + len(path) > MAX_PATTERN_LEN:
            yield pattern
            pattern = ""
        pattern = f"{pattern}|{path}" if pattern else path
    if pattern:
        yield pattern


def _config(ranks: Mapping[str, int]) -> dict[str, Any]:
    """As few patterns as can be for each rank that differs from the most common one: they are tried one by one for every module."""
    rank = Counter(ranks.values()).most_common(1)[0][0]
    others = sorted(set(ranks.values()) - {rank})
    pattern = {joined: other for other in others for joined in _joined(path for path in ranks if ranks[path] == other)}
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "inference_mode": True,
        "bias": "none",
        "r": rank,
        "lora_alpha": rank,
        "rank_pattern": pattern,
        "alpha_pattern": pattern,
        "target_modules": list(ranks),
    }
