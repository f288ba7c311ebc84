"""Moves keys and values in and out of paged blocks."""

from torch import Tensor


def store_kv(cache: Tensor, kv: Tensor, slots: Tensor) -> None:
    """cache[slot // block_size, slot % block_size] = kv.

    cache [num_blocks, block_size, 2 * num_kv_heads, head_dim], kv [num_tokens, 2 * num_kv_heads, head_dim], slots [num_tokens].
    """
    cache.view(-1, *cache.shape[2:]).index_copy_(0, slots, kv)


def gather_kv(cache: Tensor, blocks: slice | Tensor, num_seqs: int, context_len: int) -> tuple[Tensor, Tensor]:
    """The first context_len keys and values of each sequence, [num_seqs, num_kv_heads, context_len, head_dim] each.

    Consecutive blocks (a slice, one sequence) are read where they lie; others are copied together.
    """
    found = cache[blocks] if isinstance(blocks, slice) else cache.index_select(0, blocks.flatten())
    found = found.view(num_seqs, -1, *cache.shape[2:])[:, :context_len].transpose(1, 2)
    keys, values = found.chunk(2, dim=1)
    return keys, values
