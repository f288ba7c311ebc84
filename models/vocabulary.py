"""The layers cut by vocabulary: token embeddings and the head. Each knows which part of which checkpoint tensor is its own."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from loray.kernels import native
from loray.models.batch import Batch
from loray.models.dora import row_squares, squares_of
from loray.models.linear import PackedMatrix, Projection, Weight, pack_matrix
from loray.models.parallel import Parallel
from loray.models.row_sketch import RowSketch
from loray.models.shards import Shard, cut


class Embedding(nn.Module):
    """Token embeddings. As a linear, whose input is a token's place in the vocabulary: its matrix is the weight's transpose."""

    is_summed = True  # over the ranks

    def __init__(self, vocab_size: int, hidden_size: int, parallel: Parallel) -> None:
        super().__init__()
        self._vocab_size = vocab_size
        self._parallel = parallel
        self.part = cut(vocab_size, parallel.rank, parallel.world_size)
        self.projection = Projection("", vocab_size, hidden_size, Shard(0, vocab_size), (Shard(0, hidden_size),))
        self.weight = nn.Parameter(torch.empty(self.part.size, hidden_size), requires_grad=False)

    def forward(self, batch: Batch) -> Tensor:  # [num_tokens, hidden_size]
        x = self._base(batch.input_ids)
        for rows in batch.specials:
            if change := rows.special.changes.get(self):
                change.of_embedding(x[rows.tokens], batch.input_ids[rows.tokens])
        return x

    def _base(self, input_ids: Tensor) -> Tensor:
        if self._parallel.is_alone:
            is_native = native.serves(self.weight.device, self.weight.dtype)
            return native.embed(input_ids, self.weight) if is_native else F.embedding(input_ids, self.weight)
        local = input_ids - self.part.start
        is_elsewhere = (local < 0) | (local >= self.part.size)
        x = F.embedding(local.masked_fill(is_elsewhere, 0), self.weight)
        return self._parallel.all_reduce(x.masked_fill_(is_elsewhere[:, None], 0))

    def row_squares(self, _projection: int, a: Tensor, b: Tensor) -> Tensor:
        """[hidden_size] of the transpose and LoRA, over this rank's part of the vocabulary. a [rank, vocab_size], b [rank, hidden_size]."""
        own = a[:, self.part.slice]
        return row_squares(squares_of(self.weight, 0), own.to(self.weight.dtype) @ self.weight, own, b)

    def own_weight(self) -> Tensor:  # [part of the vocabulary, hidden_size]
        return self.weight

    def shown(self, rows: Tensor) -> Tensor:
        """Rows of another weight, [rows, hidden_size], as own_weight shows those of its own."""
        return rows

    def weights(self, path: str) -> Iterator[Weight]:
        shape = (self._vocab_size, self.weight.shape[1])
        yield Weight(f"{path}.weight", shape, (self.part.slice, slice(None)), self.weight)


class Head(nn.Module):
    """Hidden states to logits. Tied: its weight is the embedding's, unless the checkpoint has another for it."""

    is_summed = False

    def __init__(self, vocab_size: int, hidden_size: int, parallel: Parallel, tied_to: Embedding | None) -> None:
        super().__init__()
        self._vocab_size = vocab_size
        self._parallel = parallel
        self.part = cut(vocab_size, parallel.rank, parallel.world_size)
        self.projection = Projection("lm_head", hidden_size, vocab_size, Shard(0, hidden_size), (self.part,))
        self._shared = None if tied_to is None else tied_to.weight
        self.weight = nn.Parameter(torch.empty(self.part.size, hidden_size), requires_grad=False) if tied_to is None else tied_to.weight
        self._packed: PackedMatrix | None = None
        self._sketch: RowSketch | None = None  # where the weight itself is not kept in full
        self._squares: Tensor | None = None  # [part of the vocabulary] float32

    @property
    def is_tied(self) -> bool:
        return self.weight is self._shared

    @property
    def follows_embedding(self) -> bool:
        """Its config ties it, so that PEFT trains tokens in both at once, whatever the checkpoint has."""
        return self._shared is not None

    def untie(self) -> None:
        """The checkpoint has a tensor for it."""
        self.weight = nn.Parameter(torch.empty_like(self.weight), requires_grad=False)

    def forward(self, hidden: Tensor, batch: Batch) -> Tensor:  # [num_samples, hidden_size] -> [num_samples, vocab_size], on every rank
        logits = self._base(hidden)
        for rows in batch.specials:
            if change := rows.special.changes.get(self):
                change.of_head(logits[rows.samples], hidden[rows.samples])
        return self._parallel.gather_columns(logits, self._vocab_size)

    def _base(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.weight) if self._packed is None else self._packed(hidden)

    def row_squares(self, _projection: int, a: Tensor, b: Tensor) -> Tensor:
        """[part of the vocabulary] of the weight and LoRA. a [rank, hidden_size], b [rank, part of the vocabulary]."""
        assert self._squares is not None, "weights are loaded before adapters"
        return row_squares(self._squares, self._base(a), a, b)

    def own_weight(self) -> Tensor:  # [part of the vocabulary, hidden_size, or the size of a sketch]
        if self._sketch is not None:
            return self._sketch.values
        is_here = self._packed is None or self.is_tied
        return self.weight if is_here else self._base(torch.eye(self.projection.in_features)).T

    def shown(self, rows: Tensor) -> Tensor:
        """Rows of another weight, [rows, hidden_size], as own_weight shows those of its own."""
        return rows if self._sketch is None else self._sketch.of(rows)

    def pack(self, has_float8_weights: bool) -> None:
        if self._shared is not None and not self.is_tied and torch.equal(self.weight, self._shared):  # the same once more: keep one
            self.weight = self._shared
        self._squares = squares_of(self.weight, 1)
        if has_float8_weights and self.is_tied:  # the embedding keeps it in full, so that float8 would be more memory, not less
            return
        self._packed = pack_matrix(self.weight, has_float8_weights)
        if self._packed is not None and not self.is_tied:
            self._sketch = RowSketch(self.weight) if has_float8_weights else None
            self.weight.data = self.weight.new_empty(0)

    @property
    def packed_bytes(self) -> int:
        """Of the weight, beside the parameter."""
        return 0 if self._packed is None else self._packed.num_bytes

    def weights(self, path: str) -> Iterator[Weight]:
        if not self.is_tied:
            shape = (self._vocab_size, self.weight.shape[1])
            yield Weight(f"{path}.weight", shape, (self.part.slice, slice(None)), self.weight)
