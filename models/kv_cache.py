"""The paged KV cache of one rank: one tensor, a view for each layer. Which block belongs to whom, the driver knows."""

import torch
from torch import Tensor


class KVCache:
    def __init__(self, num_layers: int, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int) -> None:
        # [num_layers, num_blocks, block_size, 2 * num_kv_heads, head_dim], a token's keys before its values
        self._blocks = torch.empty(num_layers, num_blocks, block_size, 2 * num_kv_heads, head_dim)
        self.layers: tuple[Tensor, ...] = self._blocks.unbind()

    def clear(self, block_ids: Tensor) -> None:
        """Forget what earlier owners left: a masked score times another request's NaN would still be NaN."""
        self._blocks.index_fill_(1, block_ids, 0)
