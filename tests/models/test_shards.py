"""Cuts among ranks, over every small number of heads and ranks: nothing is left out, and nothing done twice."""

import pytest

from loray.models.shards import cut, cut_heads

MAX_HEADS = 12
GROUPED = [(heads, kv_heads) for heads in range(1, MAX_HEADS + 1) for kv_heads in range(1, heads + 1) if heads % kv_heads == 0]


@pytest.mark.parametrize("total", [*range(1, 13), 101, 49152])
@pytest.mark.parametrize("world_size", range(1, 9))
def test_cuts_cover_everything_once(total: int, world_size: int) -> None:
    parts = [cut(total, rank, world_size) for rank in range(world_size)]
    assert [i for part in parts for i in range(part.start, part.slice.stop)] == list(range(total))
    assert max(part.size for part in parts) - min(part.size for part in parts) <= 1


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), GROUPED)
def test_head_cuts_cover_every_head_once_and_keep_it_with_its_key_head(num_heads: int, num_kv_heads: int) -> None:
    group_size = num_heads // num_kv_heads
    for world_size in range(1, num_heads + 1):
        heads: list[int] = []
        for rank in range(world_size):
            shard = cut_heads(num_heads, num_kv_heads, rank, world_size)
            assert shard.query.size > 0 and shard.query.size % shard.kv.size == 0
            for i in range(shard.query.size):
                kv_head = shard.kv.start + i // (shard.query.size // shard.kv.size)
                assert (shard.query.start + i) // group_size == kv_head
            heads += range(shard.query.start, shard.query.slice.stop)
        assert heads == list(range(num_heads))


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), GROUPED)
def test_ranks_differ_by_one_key_head_or_where_they_share_those_by_one_query_head_of_the_same(num_heads: int, num_kv_heads: int) -> None:
    for world_size in range(1, num_heads + 1):
        shards = [cut_heads(num_heads, num_kv_heads, rank, world_size) for rank in range(world_size)]
        num_kv = [shard.kv.size for shard in shards]
        assert max(num_kv) - min(num_kv) <= 1
        if world_size <= num_kv_heads:
            assert sum(num_kv) == num_kv_heads, "nobody keeps keys that another keeps"
            continue
        for kv_head in range(num_kv_heads):
            sizes = [shard.query.size for shard in shards if shard.kv.start == kv_head]
            assert max(sizes) - min(sizes) <= 1


def test_smollm2_on_two_ranks_is_cut_by_whole_groups() -> None:
    shards = [cut_heads(9, 3, rank, 2) for rank in range(2)]
    assert [(shard.query.size, shard.kv.size) for shard in shards] == [(6, 2), (3, 1)]
