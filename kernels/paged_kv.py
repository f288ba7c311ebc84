"""Keys and values where they lie in the paged cache, as attention reads them. Stores nothing."""

from collections.abc import Iterator
from typing import NamedTuple

from torch import Tensor


class PagedKV(NamedTuple):
    """One layer of the cache, and the blocks of some sequences in it."""

    cache: Tensor  # [num_blocks, block_size, 2 * num_kv_heads, head_dim], keys before values, of the queries' dtype or float8_e4m3fn
    block_table: Tensor  # [num_seqs, max_blocks] int32, what lies beyond a sequence's blocks is never used
    context_lens: Tensor  # [num_seqs] int32, this step's tokens included; 0 = padding
    scales: Tensor | None = None  # [2] float32: what keys and values are multiplied by

    def sequences(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Each one's keys and values, [context_len, num_kv_heads, head_dim] each; float32 where they are scaled."""
        block_size = self.cache.shape[1]
        for blocks, context_len in zip(self.block_table, self.context_lens.tolist(), strict=True):
            found = self.cache[blocks[: -(-context_len // block_size)].long()].flatten(0, 1)[:context_len]
            keys, values = found.chunk(2, 1)
            if self.scales is not None:
                keys, values = keys.float() * self.scales[0], values.float() * self.scales[1]
            yield keys, values
