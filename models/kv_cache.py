"""The paged KV cache of one rank: one tensor, a view for each layer. Which block belongs to whom, the driver knows."""

from typing import NamedTuple

import torch
from torch import Tensor

from loray.models.device_memory import claimed

FLOAT8 = torch.float8_e4m3fn


class LayerKV(NamedTuple):
    """One layer of the cache."""

    blocks: Tensor  # [num_blocks, block_size, 2 * num_kv_heads, head_dim], a token's keys before its values
    scales: Tensor | None = None  # [2] float32, what its keys and values are multiplied by; only those in float8 have them


class KVCache:
    """`scales` [num_layers, 2] float32 make one in float8; without, it has the default dtype."""

    def __init__(self, num_layers: int, num_blocks: int, kv_shape: tuple[int, int, int], scales: Tensor | None = None) -> None:
        dtype = torch.get_default_dtype() if scales is None else FLOAT8
        block_size, num_kv_heads, head_dim = kv_shape
        self._blocks = claimed(torch.empty(num_layers, num_blocks, block_size, 2 * num_kv_heads, head_dim, dtype=dtype))
        of_layers = [None] * num_layers if scales is None else scales.unbind()
        self.layers = tuple(LayerKV(*layer) for layer in zip(self._blocks.unbind(), of_layers, strict=True))

    def clear(self, block_ids: Tensor) -> None:
        """Forget what earlier owners left: a masked score times another request's NaN would still be NaN."""
        self._blocks.index_fill_(1, block_ids, 0)

    def largest(self) -> Tensor:
        """[num_layers, 2] float32: the largest key and the largest value of each layer, without their signs."""
        parts = self._blocks.unflatten(3, (2, -1))  # [num_layers, num_blocks, block_size, 2, num_kv_heads, head_dim]
        return parts.abs().amax((1, 2, 4, 5)).float()
