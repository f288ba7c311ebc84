"""Copies the keys and values of whole sequences out of their blocks, one after another. On a GPU prefix_gather_triton.py does it."""

import torch
from torch import Tensor


def gather_prefix(kv_cache: Tensor, block_table: Tensor, cu_k: Tensor, total_k: int) -> tuple[Tensor, Tensor]:
    """k[cu_k[s] + i], v[cu_k[s] + i] = the i-th key and value of sequence s.

    kv_cache [num_blocks, block_size, 2 * num_kv_heads, head_dim], block_table [num_seqs, max_blocks] int32, cu_k [num_seqs + 1] int32
    -> k, v [total_k, num_kv_heads, head_dim], of the cache's dtype.
    """
    if kv_cache.is_cuda:
        from loray.kernels import prefix_gather_triton  # needs Triton, which a machine without a GPU may lack

        return prefix_gather_triton.gather_prefix(kv_cache, block_table, cu_k, total_k)
    block_size = kv_cache.shape[1]
    lens = cu_k.diff().long()
    seq = torch.arange(len(lens)).repeat_interleave(lens)  # [total_k]
    place = torch.arange(total_k) - cu_k[seq].long()
    rows = block_table[seq, place // block_size].long() * block_size + place % block_size
    k, v = kv_cache.flatten(0, 1)[rows].chunk(2, 1)
    return k.contiguous(), v.contiguous()
