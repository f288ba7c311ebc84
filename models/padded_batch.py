"""Sequences that run together in a left-padded batch: their mask, keys and values. Knows no model, and not what a slot stands for.

Rows join by concatenate and leave by filter; neither changes what a row's next token attends to.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

Layer = tuple[Tensor, Tensor]  # keys and values


@dataclass(frozen=True, slots=True)
class PaddedBatch:
    """Two layouts of a layer's keys and values, as models make them:

    head-dim-last: both [rows, heads, length, head_dim]
    transposed: keys [rows * heads, head_dim, length], values [rows * heads, length, head_dim]
    """

    slots: tuple[int, ...]  # [rows]
    attention_mask: Tensor  # [rows, length] bool, on the host: False = padding
    layers: tuple[Layer, ...]
    is_transposed: bool = False

    @property
    def num_rows(self) -> int:
        return len(self.slots)

    @property
    def length(self) -> int:
        return self.attention_mask.shape[1]

    @property
    def num_tokens(self) -> list[int]:
        """[rows] that are real."""
        return self.attention_mask.sum(1).tolist()

    def filter(self, keep: Sequence[int]) -> "PaddedBatch":
        """These rows, in this order, without the columns at either end that none of them uses."""
        if not keep:
            raise ValueError("a batch without rows cannot be: drop it instead")
        mask = self.attention_mask[list(keep)]
        used = mask.any(0).nonzero().flatten().tolist() or [0]
        columns = slice(used[0], used[-1] + 1)
        if list(keep) == list(range(self.num_rows)) and columns == slice(0, self.length):
            return self
        rows = torch.tensor(keep).to(self.layers[0][0].device, non_blocking=True)
        layers = [(_select(keys, rows, columns), _select(values, rows, columns)) for keys, values in self._views()]
        return self._like(tuple(self.slots[i] for i in keep), mask[:, columns], layers)

    @staticmethod
    def concatenate(batches: Sequence["PaddedBatch"]) -> "PaddedBatch":
        """The rows of all, one batch after another, shorter ones padded on the left."""
        if len(batches) == 1:
            return batches[0]
        length = max(batch.length for batch in batches)
        slots = tuple(slot for batch in batches for slot in batch.slots)
        mask = torch.cat([F.pad(batch.attention_mask, (length - batch.length, 0)) for batch in batches])
        layers = [
            (_stack([keys for keys, _ in parts], length), _stack([values for _, values in parts], length))
            for parts in zip(*(batch._views() for batch in batches), strict=True)
        ]
        return batches[0]._like(slots, mask, layers)

    def _views(self) -> list[Layer]:
        """Every layer's keys and values as [rows, heads, length, head_dim]."""
        if not self.is_transposed:
            return list(self.layers)
        return [(keys.unflatten(0, (self.num_rows, -1)).mT, values.unflatten(0, (self.num_rows, -1))) for keys, values in self.layers]

    def _like(self, slots: tuple[int, ...], mask: Tensor, layers: list[Layer]) -> "PaddedBatch":
        """A batch of the same layout, from layers [rows, heads, length, head_dim]."""
        if self.is_transposed:
            layers = [(keys.mT.contiguous().flatten(0, 1), values.flatten(0, 1)) for keys, values in layers]
        return PaddedBatch(slots, mask, tuple(layers), self.is_transposed)


def _select(part: Tensor, rows: Tensor, columns: slice) -> Tensor:
    return part[:, :, columns].index_select(0, rows)


def _stack(parts: list[Tensor], length: int) -> Tensor:
    """Each [its rows, heads, its length, head_dim] -> [all rows, heads, length, head_dim], padded with zeros: a masked NaN is still one."""
    _, heads, _, head_dim = parts[0].shape
    stacked = parts[0].new_zeros(sum(len(part) for part in parts), heads, length, head_dim)
    first_row = 0
    for part in parts:
        stacked[first_row : first_row + len(part), :, length - part.shape[2] :] = part
        first_row += len(part)
    return stacked
