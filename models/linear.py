"""Linear layers cut among ranks. Each knows which part of which checkpoint tensor is its own; none reads files.

A layer may fuse several linears of the checkpoint (q|k|v, gate|up), and may carry LoRA pages for them.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from loray.kernels.acl_linear import AclMatrix, pack_acl
from loray.kernels.activation import gate, gate_updated
from loray.kernels.delta import Parted
from loray.kernels.float8_linear import Float8Matrix, pack_float8
from loray.kernels.half_linear import HalfMatrix, pack_half
from loray.kernels.linear import add_bias, linear
from loray.kernels.lora import LoraPages, LoraSegments, add_lora, lora_beside
from loray.kernels.native_linear import NativeMatrix, pack_native
from loray.models.batch import Batch
from loray.models.dora import row_squares, squares_of
from loray.models.parallel import Parallel
from loray.models.shards import Shard


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
        self._packed: PackedMatrix | None = None  # then the weight is empty, and says in which dtype adapters are kept
        self._squares: Tensor | None = None  # [outputs] float32, of the weight's rows
        self._parallel = parallel
        self.is_summed = is_row_parallel  # over the ranks
        self.counts_shifts = not is_row_parallel or parallel.rank == 0  # what is added to a summed output counts once
        self._is_conv1d = is_conv1d  # the checkpoint's matrices are [in, out]

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        # [num_tokens, inputs of this rank] -> [num_tokens, outputs of this rank]
        y = self.partial(x, batch)
        return self._parallel.all_reduce(y) if self.is_summed else y

    def parted(self, x: Tensor, batch: Batch) -> Parted:
        """The same, where the caller adds up what is computed apart."""
        work = batch.lora_work
        if not isinstance(work, LoraSegments) or work.stream is None or (self.is_summed and not self._parallel.is_alone):
            return Parted(self(x, batch))
        assert self.lora is not None and not batch.specials, "captured steps have pages, and nothing beside them"
        return lora_beside(x, self.lora, work, lambda: self._base(x, self.bias if self.counts_shifts else None))

    def gated(self, act: Callable[[Tensor], Tensor], x: Tensor, batch: Batch) -> Tensor:
        """act(gate) * up, where this layer's output is gate | up: [num_tokens, half the outputs]."""
        work = batch.lora_work
        if not work or batch.specials or (isinstance(work, LoraSegments) and work.stream is not None):
            return gate(act, self.parted(x, batch))
        assert self.lora is not None, "a row has LoRA pages, but no pages were allocated"
        return gate_updated(act, self._base(x, self.bias), x, self.lora, work)

    def partial(self, x: Tensor, batch: Batch) -> Tensor:
        """Without the sum over the ranks: whoever adds several such outputs sums them once."""
        bias = self.bias if self.counts_shifts else None
        y = self._base(x, bias)
        for rows in batch.specials:
            if change := rows.special.changes.get(self):
                change.of_linear(y[rows.tokens], bias)
        if batch.lora_work:
            assert self.lora is not None, "a row has LoRA pages, but no pages were allocated"
            add_lora(y, x, self.lora, batch.lora_work)
        return y

    def _base(self, x: Tensor, bias: Tensor | None) -> Tensor:
        if self._packed is None:
            return linear(x, self.weight, bias)
        y = self._packed(x)
        return y if bias is None else add_bias(y, bias)

    def row_squares(self, projection: int, a: Tensor, b: Tensor) -> Tensor:
        """[width] of one projection's weight and LoRA, over this rank's inputs. a [rank, inputs], b [rank, width]."""
        assert self._squares is not None, "weights are loaded before adapters"
        product = self._base(a, None).split(self.widths, 1)[projection]
        return row_squares(self._squares.split(self.widths)[projection], product, a, b)

    def pack(self, has_float8_weights: bool) -> None:
        """Once the weights are here: keep them in the form that is read fastest."""
        self._squares = squares_of(self.weight, 1)
        self._packed = pack_matrix(self.weight, has_float8_weights)
        if self._packed is not None:
            self.weight.data = self.weight.new_empty(0)

    @property
    def packed_bytes(self) -> int:
        """Of the weight, beside the parameter."""
        return 0 if self._packed is None else self._packed.num_bytes

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


PackedMatrix = HalfMatrix | NativeMatrix | AclMatrix | Float8Matrix


def pack_matrix(weight: Tensor, has_float8_weights: bool) -> PackedMatrix | None:
    """None where it stays as it is."""
    return pack_float8(weight) if has_float8_weights else pack_native(weight) or pack_half(weight) or pack_acl(weight)


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
