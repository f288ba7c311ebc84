"""Copies the keys and values of whole sequences out of their blocks on a GPU, in one launch.

Its twin in plain torch is `gather_prefix` of prefix_gather.py.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

COLUMNS_AT_ONCE = 512  # of a token's keys, and as many of its values: 32 KB under way in bfloat16


def gather_prefix(kv_cache: Tensor, block_table: Tensor, cu_k: Tensor, total_k: int) -> tuple[Tensor, Tensor]:
    """k[cu_k[s] + i], v[cu_k[s] + i] = the i-th key and value of sequence s; shapes as in prefix_gather.py."""
    _, block_size, twice_kv_heads, head_dim = kv_cache.shape
    num_seqs, max_blocks = block_table.shape
    assert kv_cache.is_contiguous() and block_table.stride(1) == 1 and cu_k.is_contiguous(), "a sequence's blocks lie together"
    assert block_size & (block_size - 1) == 0, "a block is one tile"
    k = torch.empty(total_k, twice_kv_heads // 2, head_dim, dtype=kv_cache.dtype, device=kv_cache.device)
    v = torch.empty(total_k, twice_kv_heads // 2, head_dim, dtype=kv_cache.dtype, device=kv_cache.device)
    if total_k:
        _gather_kernel[(max_blocks, num_seqs)](
            kv_cache, block_table, cu_k, k, v, block_table.stride(0), k.stride(0), BLOCK_SIZE=block_size, COLUMNS=COLUMNS_AT_ONCE
        )
    return k, v


# However many blocks a step has, and wherever its prompts begin: nobody waits for another kernel to be compiled.
@triton.jit(do_not_specialize=["table_stride"], do_not_specialize_on_alignment=["block_table", "cu_k"])
def _gather_kernel(  # type: ignore[no-untyped-def]
    kv_cache, block_table, cu_k, k, v, table_stride, num_columns, BLOCK_SIZE: tl.constexpr, COLUMNS: tl.constexpr
):
    """One block of one sequence; where it has none, nothing."""
    block, seq = tl.program_id(0), tl.program_id(1).to(tl.int64)
    first, end = tl.load(cu_k + seq) + block * BLOCK_SIZE, tl.load(cu_k + seq + 1)
    if first >= end:
        return
    token = tl.arange(0, BLOCK_SIZE)
    is_token = first + token < end
    block_id = tl.load(block_table + seq * table_stride + block).to(tl.int64)
    source = kv_cache + (block_id * BLOCK_SIZE + token)[:, None] * (2 * num_columns)
    target = (first + token).to(tl.int64)[:, None] * num_columns
    for start in range(0, num_columns, COLUMNS):
        column = (start + tl.arange(0, COLUMNS))[None, :]
        is_there = is_token[:, None] & (column < num_columns)
        keys = tl.load(source + column, mask=is_there)
        values = tl.load(source + num_columns + column, mask=is_there)
        tl.store(k + target + column, keys, mask=is_there)
        tl.store(v + target + column, values, mask=is_there)
