"""One rank's part of an adapter in host memory: read from a PEFT folder, cut and scaled as the rank wants it. Knows no pages."""

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from math import prod
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from loray.models.adapter import HEAD, WEIGHTS_FILE, AdapterError, AdapterModule, AdapterSpec, no_tokens
from loray.models.adapter_header import TensorPlace
from loray.models.file_tensors import FileTensors, rows_of
from loray.models.host_memory import host_tensor
from loray.models.hosted_linear import HostedLinear
from loray.models.linear import Linear, Projection
from loray.models.vocabulary import Embedding, Head

MAX_ELEMENTS_OF_GPU = 1 << 24  # of which it has a few copies in float32 at once
MAX_ELEMENTS_AT_ONCE = 32767  # from 32768 on torch shares an operation out among threads, which decoding needs
MAX_DISTANCE = 1e-6  # of a copy's row from the base model's, in its length, beside that of rounding
MAX_DISTANCE_OF_SKETCHES = 1e-5  # their sums are of float32
HALVES = (torch.bfloat16, torch.float16)

_READING = threading.Lock()

Layer = Linear | HostedLinear | Embedding | Head
Vector = Literal["magnitude", "bias", "bias of B"]


class Target(NamedTuple):
    """One module of the checkpoint that can carry LoRA."""

    layer: Layer
    number: int  # of its projection among the layer's
    projection: Projection

    @property
    def shape(self) -> tuple[int, int]:
        return self.projection.in_features, self.projection.out_features

    def columns(self, of_layer: Tensor) -> Tensor:
        """Its part of a layer's outputs: [outputs of the layer] -> [width]."""
        return of_layer.split(self.layer.widths)[self.number] if isinstance(self.layer, Linear | HostedLinear) else of_layer


@dataclass(frozen=True, slots=True)
class RankAdapter:
    spec: AdapterSpec
    values: Tensor  # [elements] all matrices one after another, pinned where there is a GPU
    shapes: dict[tuple[str, str], tuple[int, int]]  # in values, in this order: (module path, "a" | "b" | "rows") -> shape
    vectors: dict[tuple[str, Vector], Tensor]  # [width] float32, by module path
    squares: dict[str, Tensor]  # DoRA: [width] float32, ||W + scale * B A||² of each row over this rank's inputs

    @property
    def has_pages_only(self) -> bool:
        return not self.vectors and not self.spec.tokens and not self.spec.beyond_pages

    @property
    def num_bytes(self) -> int:
        return self.values.nbytes + sum(tensor.nbytes for tensor in (*self.vectors.values(), *self.squares.values()))

    def matrices(self, device: torch.device) -> dict[tuple[str, str], Tensor]:
        """Views of one copy on the device: A [rank, inputs], scale * B^T [rank, outputs] and rows of trained tokens."""
        return _views(self.values.to(device, non_blocking=True), self.shapes)


def read_rank_adapter(folder: Path, spec: AdapterSpec, targets: Mapping[str, Target], is_pinned: bool) -> RankAdapter:
    """targets: by module path. Safe beside decoding: one thread, and small steps outside the interpreter's lock."""
    shapes = dict(_shapes(spec, targets))
    dtypes = {target.layer.weight.dtype for target in targets.values()}
    num_elements = sum(prod(shape) for shape in shapes.values())
    values = host_tensor(num_elements, dtypes.pop() if len(dtypes) == 1 else torch.float32, is_pinned)
    views = _views(values, shapes)
    max_elements = num_elements if is_pinned else MAX_ELEMENTS_AT_ONCE  # a GPU decodes without this machine's threads
    try:
        _check_tokens(spec, targets)
        copies = set(spec.copies.values())  # may be gigabytes, and are only looked at
        tensors = FileTensors(folder / WEIGHTS_FILE, {name: place for name, place in spec.places.items() if name not in copies})
        for path, module in spec.modules.items():
            _read_lora(tensors, module, targets[path].projection, (views[path, "a"], views[path, "b"]), max_elements)
        for path, tokens in spec.tokens.items():
            _copy(views[path, "rows"], tensors[tokens.name], 1.0, max_elements)
        vectors = dict(_vectors(tensors, spec, targets))
        _check_finite(values, views, vectors, spec, max_elements)
        for path, name in spec.copies.items():
            _check_copy(folder / WEIGHTS_FILE, spec.places[name], name, targets[path].layer)
        squares = _squares(spec, views, targets)
    except (OSError, KeyError, RuntimeError, ValueError) as error:  # also: another file than the one just checked
        raise AdapterError(f"adapter {folder.name!r}: {WEIGHTS_FILE} cannot be read: {error}") from error
    except AdapterError as error:
        raise AdapterError(f"adapter {folder.name!r}: {error}") from None
    return RankAdapter(spec, values, shapes, vectors, squares)


def _check_tokens(spec: AdapterSpec, targets: Mapping[str, Target]) -> None:
    """Where the head is tied to the embedding and both have the same tokens, PEFT saves and reads the embedding's."""
    if not spec.has_same_tokens:
        return
    head = targets[HEAD].layer
    is_tied = isinstance(head, Head) and head.follows_embedding
    if not is_tied and HEAD not in spec.tokens:
        raise no_tokens(HEAD)
    if is_tied and HEAD in spec.tokens:
        raise AdapterError(f"tensor {spec.tokens[HEAD].name}: {HEAD} is tied to the embedding, so PEFT would not read it")


def _check_finite(
    values: Tensor,
    views: Mapping[tuple[str, str], Tensor],
    vectors: Mapping[tuple[str, Vector], Tensor],
    spec: AdapterSpec,
    max_elements: int,
) -> None:
    """values: all of the views at once, which is quicker. A sum is finite only if all of its terms are."""
    are_finite = all(part.sum().isfinite() for part in values.split(max(max_elements, 1)))
    suspects = [*([] if are_finite else views.items()), *vectors.items()]
    for key, tensor in suspects:
        if not tensor.isfinite().all():
            dtype = str(tensor.dtype).removeprefix("torch.")
            raise AdapterError(f"tensor {_tensor_names(spec)[key]} has numbers that are not finite, or too large for {dtype}")


def _tensor_names(spec: AdapterSpec) -> dict[tuple[str, str], str]:
    """In the file, by what they are here."""
    names = {(path, "bias"): name for path, name in spec.biases.items()}
    names |= {(path, "rows"): tokens.name for path, tokens in spec.tokens.items()}
    for path, module in spec.modules.items():
        names |= {(path, "a"): module.a_name, (path, "b"): module.b_name}
        names |= {(path, "magnitude"): module.magnitude_name, (path, "bias of B"): module.b_bias_name}
    return names


def _shapes(spec: AdapterSpec, targets: Mapping[str, Target]) -> Iterator[tuple[tuple[str, str], tuple[int, int]]]:
    for path, module in spec.modules.items():
        yield (path, "a"), (module.rank, targets[path].projection.in_part.size)
        yield (path, "b"), (module.rank, targets[path].projection.width)
    for path, tokens in spec.tokens.items():
        layer = targets[path].layer
        hidden_size = layer.projection.out_features if isinstance(layer, Embedding) else targets[path].projection.in_features
        yield (path, "rows"), (len(tokens.token_ids), hidden_size)


def _views(values: Tensor, shapes: dict[tuple[str, str], tuple[int, int]]) -> dict[tuple[str, str], Tensor]:
    parts = values.split([prod(shape) for shape in shapes.values()])
    return {key: part.view(shape) for (key, shape), part in zip(shapes.items(), parts, strict=True)}


def _read_lora(
    tensors: FileTensors, module: AdapterModule, projection: Projection, matrices: tuple[Tensor, Tensor], max_elements: int
) -> None:
    """a [rank, inputs], b [rank, outputs]: filled."""
    a, b = matrices
    _copy(a, tensors[module.a_name][:, projection.in_part.slice], 1.0, max_elements)
    sizes = [part.size for part in projection.out_parts]
    for out, part in zip(b.split(sizes, 1), projection.out_parts, strict=True):
        _copy(out.T, tensors[module.b_name][part.slice], module.scale, max_elements)


def _copy(out: Tensor, values: Tensor, scale: float, max_elements: int) -> None:
    """out = scale * values, some rows at once; multiplied in float32."""
    num_rows = max(1, max_elements // max(1, values.shape[1]))
    pairs = [(out, values)] if len(values) <= num_rows else zip(out.split(num_rows), values.split(num_rows), strict=True)
    for out_rows, rows in pairs:
        if scale == 1:
            out_rows.copy_(rows)
        elif rows.dtype in (out.dtype, torch.float32):  # torch multiplies halves in float32 too
            torch.mul(rows, scale, out=out_rows)
        else:
            out_rows.copy_(rows.float() * scale)


def _vectors(tensors: FileTensors, spec: AdapterSpec, targets: Mapping[str, Target]) -> Iterator[tuple[tuple[str, Vector], Tensor]]:
    def read(path: str, name: str) -> Tensor:
        return torch.cat([tensors[name][part.slice] for part in targets[path].projection.out_parts]).float()

    for path, module in spec.modules.items():
        if module.magnitude_name:
            yield (path, "magnitude"), read(path, module.magnitude_name)
        if module.b_bias_name:
            yield (path, "bias of B"), read(path, module.b_bias_name) * module.scale
    for path, name in spec.biases.items():
        layer = targets[path].layer
        if not isinstance(layer, Linear | HostedLinear) or layer.bias is None:
            raise AdapterError(f"tensor {name}: {path} has no bias in the base model")
        yield (path, "bias"), read(path, name)


def _squares(spec: AdapterSpec, views: dict[tuple[str, str], Tensor], targets: Mapping[str, Target]) -> dict[str, Tensor]:
    """Costs as much as a forward pass over as many tokens as the adapter has ranks, so it is done before the pages are filled."""
    paths = [path for path, module in spec.modules.items() if module.magnitude_name]
    if not paths:
        return {}
    with _beside_steps(targets[paths[0]].layer.weight.device):
        found = [_squares_of(targets[path], views[path, "a"], views[path, "b"]) for path in paths]
        squares = torch.cat(found).cpu()
    return dict(zip(paths, squares.split([len(one) for one in found]), strict=True))


@contextmanager
def _beside_steps(device: torch.device) -> Iterator[None]:
    """On a GPU a stream of its own, so that steps don't wait for what is computed, nor it for them; one thread at a time has it."""
    if device.type == "cuda":
        with _READING, torch.cuda.stream(_stream(device)):
            yield
    else:
        yield


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def _squares_of(target: Target, a: Tensor, b: Tensor) -> Tensor:
    layer = target.layer
    assert not isinstance(layer, HostedLinear), "DoRA is refused on a model that transformers runs"
    a, b = (matrix.to(layer.weight.device, layer.weight.dtype) for matrix in (a, b))
    return layer.row_squares(target.number, a, b)


def _check_copy(file: Path, place: TensorPlace, name: str, layer: Layer) -> None:
    """PEFT puts it in the place of the base model's weight, so it must be that."""
    assert isinstance(layer, Embedding | Head), "only the embedding and the head are saved beside their LoRA"
    device, part = layer.weight.device, range(place.shape[0])[layer.part.slice]
    num_rows = max(1, (MAX_ELEMENTS_OF_GPU if device.type == "cuda" else MAX_ELEMENTS_AT_ONCE) // place.shape[1])
    with _beside_steps(device):
        own = layer.own_weight().split(num_rows)
    is_near = True
    for own_rows, rows in zip(own, rows_of(file, place, part, num_rows), strict=True):
        with _beside_steps(device):
            is_near &= _is_copy(layer, rows.to(device), own_rows)
    if not is_near:
        raise AdapterError(f"tensor {name} is not the base model's own: modules trained as a whole are not supported")


def _is_copy(layer: Embedding | Head, rows: Tensor, own: Tensor) -> bool:
    """rows [rows, hidden_size], own [rows, hidden_size, or the size of a sketch]. Each may be rounded to its dtype, and to another one
    before: a model loaded in half precision is saved in float32 by those who train so."""
    dtypes = {rows.dtype, own.dtype, layer.weight.dtype}
    rows, own = rows.float(), own.float()
    shown = layer.shown(rows)
    slack = MAX_DISTANCE if shown is rows else MAX_DISTANCE_OF_SKETCHES
    distances, lengths, width = (shown - own).norm(dim=1), rows.norm(dim=1), rows.shape[1]
    if not lengths.isfinite().all():
        return False
    are_near = [distances <= slack * lengths + _rounding(dtype, lengths, width) for dtype in dtypes]
    if not torch.stack(are_near).any(0).all():
        for dtype in HALVES:
            is_rounded = (rows.to(dtype) == rows).all(1) | (own.to(dtype) == own).all(1)
            are_near.append(is_rounded & (distances <= slack * lengths + _rounding(dtype, lengths, width)))
    return bool(torch.stack(are_near).any(0).all())


def _rounding(dtype: torch.dtype, lengths: Tensor, width: int) -> Tensor:
    """[rows] how far a row of this length and width may be from what it was before: half the last digit of each number, of the
    smallest numbers of float16 a fixed one."""
    kind = torch.finfo(dtype)
    return kind.eps / 2 * lengths + kind.smallest_normal * kind.eps / 2 * width**0.5
