"""What few adapters have beside their rank pages: gains (DoRA), shifts (biases), and changes of the embedding and the head.

Belongs to the tokens of one adapter at a time. Read from no file here; the pages themselves are in kernels/lora.py.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn


class LowRank(NamedTuple):
    a: Tensor  # [rank, inputs]
    b: Tensor  # [rank, outputs], scale and gain included


class TokenRows(NamedTuple):
    """Rows of an embedding or head that replace the base model's."""

    token_ids: Tensor  # [tokens] int64; of a head, counted from the first of this rank's part of the vocabulary
    rows: Tensor  # [tokens, hidden_size]


@dataclass(frozen=True, slots=True)
class Change:
    """Of one linear's output: y + gain * (y - bias) + shift, and for the embedding and the head, whose LoRA has no pages, that too."""

    gain: Tensor | None = None  # [outputs] DoRA's factor, less one
    shift: Tensor | None = None  # [outputs]
    lora: LowRank | None = None
    tokens: TokenRows | None = None

    def of_linear(self, y: Tensor, bias: Tensor | None) -> None:
        """y [num_tokens, outputs], in place; bias is what was added to it."""
        if self.gain is not None:
            y.addcmul_(self.gain, y if bias is None else y - bias)
        if self.shift is not None:
            y.add_(self.shift)

    def of_embedding(self, x: Tensor, input_ids: Tensor) -> None:
        """x [num_tokens, hidden_size], in place."""
        self.of_linear(x, None)
        if self.lora is not None:
            x.add_(self.lora.a.index_select(1, input_ids).T @ self.lora.b)
        if self.tokens is not None:
            is_trained = input_ids[:, None] == self.tokens.token_ids  # [num_tokens, tokens]
            rows = self.tokens.rows[is_trained.int().argmax(1)]
            x.copy_(torch.where(is_trained.any(1, keepdim=True), rows, x))

    def of_head(self, logits: Tensor, hidden: Tensor) -> None:
        """logits [num_samples, this rank's vocabulary], in place; hidden [num_samples, hidden_size]."""
        self.of_linear(logits, None)
        if self.lora is not None:
            logits.add_(hidden @ self.lora.a.T @ self.lora.b)
        if self.tokens is not None:
            logits.index_copy_(1, self.tokens.token_ids, hidden @ self.tokens.rows.T)


@dataclass(frozen=True, slots=True)
class Special:
    """One adapter's changes."""

    page_ids: frozenset[int]
    changes: dict[nn.Module, Change]


class SpecialRows(NamedTuple):
    """Neighbouring tokens of a batch that have the same special adapter."""

    tokens: slice
    samples: slice  # those among the tokens whose logits are wanted
    special: Special
