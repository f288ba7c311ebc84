"""Linear layers and embeddings cut among ranks. Each knows which part of which checkpoint tensor is its own; none reads files.

A layer may fuse several linears of the checkpoint (q|k|v, gate|up), and may carry LoRA pages for them.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from loray.kernels.half_linear import HalfMatrix, pack_half
from loray.kernels.lora import LoraPages, add_lora
from loray.models.batch import Batch
from loray.models.parallel import Parallel
from loray.models.shards import Shard, cut


@dataclass(frozen=True, slots=True)
class Projection:
    """One linear of the checkpoint: its whole size, and the part of its inputs and outputs that this rank computes."""

    name: str  # as the checkpoint calls it, beside the layer
    in_features: int
    out_features: int
    in_part: Shard
    out_parts: tuple[Shard, ...]  # in the order in which the layer gives them; several where the checkpoint itself is fused

    @property
    def width(self) -> int:
        return sum(part.size for part in self.out_parts)


@dataclass(frozen=True, slots=True)
class Weight:
    """One checkpoint tensor, or a piece of it, and where this rank's part goes."""

    name: str  # full, as in the checkpoint
    shape: tuple[int, ...]  # of the whole tensor
    part: tuple[slice, ...]
    out: Tensor


class Linear(nn.Module):
    """x W^T + bias, plus each token's LoRA. Cut by outputs (column-parallel), by inputs (row-parallel, then summed), or whole."""

    def __init__(
        self, projections: list[Projection], bias: bool, parallel: Parallel, is_row_parallel: bool = False, is_conv1d: bool = False
    ) -> None:
        super().__init__()
        self.projections = projections
        self.widths = [projection.width for projection in projections]
        self.in_size, self.out_size = projections[0].in_part.size, sum(self.widths)
        self.weight = nn.Parameter(torch.empty(self.out_size, self.in_size), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(self.out_size), requires_grad=False) if bias else None
        self.lora: LoraPages | None = None
        self._half: HalfMatrix | None = None
        self._parallel = parallel
        self._is_row_parallel = is_row_parallel
        self._is_conv1d = is_conv1d  # the checkpoint's matrices are [in, out]

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        # [num_tokens, inputs of this rank] -> [num_tokens, outputs of this rank]
        y = self.partial(x, batch)
        return self._parallel.all_reduce(y) if self._is_row_parallel else y

    def partial(self, x: Tensor, batch: Batch) -> Tensor:
        """Without the sum over the ranks: whoever adds several such outputs sums them once."""
        bias = None if self._is_row_parallel and self._parallel.rank > 0 else self.bias  # a summed bias counts once
        if self._half is None:
            y = F.linear(x, self.weight, bias)
        else:
            y = self._half(x)
            if bias is not None:
                y += bias
        if batch.lora_groups:
            assert self.lora is not None, "a row has LoRA pages, but no pages were allocated"
            add_lora(y, x, self.lora, batch.lora_groups)
        return y

    def pack(self) -> None:
        """Once the weights are here: keep them in the form that is read fastest."""
        self._half = pack_half(self.weight)
        if self._half is not None:
            self.weight.data = self.weight.new_empty(0)

    def weights(self, path: str) -> Iterator[Weight]:
        first_row = 0
        for name, projection in zip(self.paths(path), self.projections, strict=True):
            outputs, inputs = projection.out_features, projection.in_features
            for part in projection.out_parts:
                rows = slice(first_row, first_row + part.size)
                first_row += part.size
                if self._is_conv1d:
                    yield Weight(f"{name}.weight", (inputs, outputs), (projection.in_part.slice, part.slice), self.weight[rows].T)
                else:
                    yield Weight(f"{name}.weight", (outputs, inputs), (part.slice, projection.in_part.slice), self.weight[rows])
                if self.bias is not None:
                    yield Weight(f"{name}.bias", (outputs,), (part.slice,), self.bias[rows])

    def paths(self, path: str) -> list[str]:
        """What the checkpoint calls this layer's projections: they lie beside the layer itself."""
        parent = path.rpartition(".")[0]
        return [f"{parent}.{projection.name}" for projection in self.projections]


Parts = Shard | tuple[Shard, ...]


def column_linear(
    in_features: int, outputs: Mapping[str, tuple[int, Parts]], bias: bool, parallel: Parallel, is_conv1d: bool = False
) -> Linear:
    """Fused linears over the same input: name -> (whole output size, this rank's part or parts)."""
    whole = Shard(0, in_features)
    projections = [
        Projection(name, in_features, total, whole, (parts,) if isinstance(parts, Shard) else parts)
        for name, (total, parts) in outputs.items()
    ]
    return Linear(projections, bias, parallel, is_conv1d=is_conv1d)


def row_linear(name: str, inputs: tuple[int, Shard], out_features: int, bias: bool, parallel: Parallel, is_conv1d: bool = False) -> Linear:
    """inputs: (whole input size, this rank's part)."""
    in_features, in_part = inputs
    projection = Projection(name, in_features, out_features, in_part, (Shard(0, out_features),))
    return Linear([projection], bias, parallel, is_row_parallel=True, is_conv1d=is_conv1d)


def whole_linear(name: str, in_features: int, out_features: int, bias: bool, parallel: Parallel) -> Linear:
    """The same on every rank."""
    return column_linear(in_features, {name: (out_features, Shard(0, out_features))}, bias, parallel)


class Embedding(nn.Module):
    """Token embeddings, cut by vocabulary."""

    def __init__(self, vocab_size: int, hidden_size: int, parallel: Parallel) -> None:
        super().__init__()
        self._vocab_size = vocab_size
        self._parallel = parallel
        self._part = cut(vocab_size, parallel.rank, parallel.world_size)
        self.weight = nn.Parameter(torch.empty(self._part.size, hidden_size), requires_grad=False)

    def forward(self, input_ids: Tensor) -> Tensor:  # [num_tokens] -> [num_tokens, hidden_size]
        if self._parallel.world_size == 1:
            return F.embedding(input_ids, self.weight)
        local = input_ids - self._part.start
        is_elsewhere = (local < 0) | (local >= self._part.size)
        x = F.embedding(local.masked_fill(is_elsewhere, 0), self.weight)
        return self._parallel.all_reduce(x.masked_fill_(is_elsewhere[:, None], 0))

    def weights(self, path: str) -> Iterator[Weight]:
        shape = (self._vocab_size, self.weight.shape[1])
        yield Weight(f"{path}.weight", shape, (self._part.slice, slice(None)), self.weight)


class Head(nn.Module):
    """Hidden states to logits, cut by vocabulary. Tied: its weight is the embedding's, unless the checkpoint has another for it."""

    def __init__(self, vocab_size: int, hidden_size: int, parallel: Parallel, tied_to: Embedding | None) -> None:
        super().__init__()
        self._vocab_size = vocab_size
        self._parallel = parallel
        self._part = cut(vocab_size, parallel.rank, parallel.world_size)
        self._shared = None if tied_to is None else tied_to.weight
        self.weight = nn.Parameter(torch.empty(self._part.size, hidden_size), requires_grad=False) if tied_to is None else tied_to.weight
        self._half: HalfMatrix | None = None

    @property
    def is_tied(self) -> bool:
        return self.weight is self._shared

    def untie(self) -> None:
        """The checkpoint has a tensor for it."""
        self.weight = nn.Parameter(torch.empty_like(self.weight), requires_grad=False)

    def forward(self, hidden: Tensor) -> Tensor:  # [num_samples, hidden_size] -> [num_samples, vocab_size], on every rank
        logits = F.linear(hidden, self.weight) if self._half is None else self._half(hidden)
        return self._parallel.gather_columns(logits, self._vocab_size)

    def pack(self) -> None:
        if self._shared is not None and not self.is_tied and torch.equal(self.weight, self._shared):  # the same once more: keep one
            self.weight = self._shared
        self._half = pack_half(self.weight)
        if self._half is not None and not self.is_tied:
            self.weight.data = self.weight.new_empty(0)

    def weights(self, path: str) -> Iterator[Weight]:
        if not self.is_tied:
            shape = (self._vocab_size, self.weight.shape[1])
            yield Weight(f"{path}.weight", shape, (self._part.slice, slice(None)), self.weight)
