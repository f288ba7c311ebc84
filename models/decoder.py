"""What every natively served model is to its runner: tokens in, hidden states or logits out. The families fill in the layers."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar

from torch import Tensor, nn

from loray.models.batch import Batch
from loray.models.kv_cache import LayerKV
from loray.models.shards import HeadShard
from loray.models.vocabulary import Head


class Decoder(nn.Module, ABC):
    """Modules bear the checkpoint's names."""

    prefix: ClassVar[str]  # of the bare model; checkpoints made from it leave it out
    renamed: ClassVar[Mapping[str, str]] = {}  # a tensor's name here -> what some checkpoints call it
    ignored_tensors: ClassVar[tuple[str, ...]] = ()  # ends of names that a checkpoint may have for nothing
    windows: frozenset[int] = frozenset({0})  # widths of its layers' sliding windows, 0 = none
    score_cap: float = 0.0  # of its attention, 0 = none
    lm_head: Head

    def __init__(self, num_layers: int, heads: HeadShard, head_dim: int) -> None:
        super().__init__()
        self.kv_shape = (num_layers, heads.kv.size, head_dim)

    @abstractmethod
    def hidden(self, batch: Batch, kv_caches: Sequence[LayerKV]) -> Tensor:
        """[num_tokens, hidden], as the head takes them; one cache for each layer, [num_blocks, block_size, 2 * num_kv_heads, head_dim]."""

    def logits(self, hidden: Tensor, batch: Batch) -> Tensor:
        """[num_samples, hidden] of the batch's sample tokens -> [num_samples, vocab_size], on every rank."""
        return self.lm_head(hidden, batch)
