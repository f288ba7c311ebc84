"""Keys and values come back from their blocks as they went in."""

import torch

from loray.kernels.kv_store import gather_kv, store_kv


def test_what_is_stored_is_gathered_in_the_order_of_the_sequence() -> None:
    cache = torch.zeros(6, 4, 2 * 3, 5)  # 6 blocks of 4 tokens, 3 key heads
    kv = torch.randn(7, 6, 5)
    store_kv(cache, kv, torch.tensor([20, 21, 22, 23, 4, 5, 6]))  # block 5, then block 1
    keys, values = gather_kv(cache, torch.tensor([[5, 1]]), num_seqs=1, context_len=7)
    assert torch.equal(keys[0].transpose(0, 1), kv[:, :3])
    assert torch.equal(values[0].transpose(0, 1), kv[:, 3:])


def test_consecutive_blocks_are_read_where_they_lie() -> None:
    cache = torch.randn(6, 4, 2, 5)
    keys, values = gather_kv(cache, slice(2, 4), num_seqs=1, context_len=6)
    copied_keys, copied_values = gather_kv(cache, torch.tensor([[2, 3]]), num_seqs=1, context_len=6)
    assert torch.equal(keys, copied_keys) and torch.equal(values, copied_values)
    assert keys.untyped_storage().data_ptr() == cache.untyped_storage().data_ptr()


def test_sequences_are_gathered_side_by_side() -> None:
    cache = torch.randn(6, 4, 2, 5)
    keys, _ = gather_kv(cache, torch.tensor([[4, 0], [1, 3]]), num_seqs=2, context_len=8)
    assert torch.equal(keys[1, 0], torch.cat([cache[1, :, 0], cache[3, :, 0]]))
