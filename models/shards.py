"""How a layer's heads, columns and vocabulary are cut among tensor-parallel ranks. Plain integers: no tensors, no torch.

Nothing has to divide evenly: the first ranks take one more.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Shard:
    """One rank's contiguous part of a dimension."""

    start: int
    size: int

    @property
    def slice(self) -> slice:
        return slice(self.start, self.start + self.size)

    def scaled(self, unit: int) -> "Shard":
        """The same part counted in smaller things: heads -> columns."""
        return Shard(self.start * unit, self.size * unit)

    def shifted(self, distance: int) -> "Shard":
        return Shard(self.start + distance, self.size)


@dataclass(frozen=True, slots=True)
class HeadShard:
    """One rank's query heads, and the key-value heads that they read."""

    query: Shard
    kv: Shard


def cut(total: int, rank: int, world_size: int) -> Shard:
    size, remainder = divmod(total, world_size)
    return Shard(rank * size + min(rank, remainder), size + (rank < remainder))


def cut_heads(num_heads: int, num_kv_heads: int, rank: int, world_size: int) -> HeadShard:
    """Whole key-value groups to each rank; where ranks outnumber groups, several share one and split its query heads."""
    assert num_heads % num_kv_heads == 0, f"{num_heads} heads do not form groups over {num_kv_heads} key-value heads"
    assert world_size <= num_heads, f"{world_size} ranks for {num_heads} attention heads: each rank needs one"
    group_size = num_heads // num_kv_heads
    if world_size <= num_kv_heads:
        kv = cut(num_kv_heads, rank, world_size)
        return HeadShard(kv.scaled(group_size), kv)
    group = next(g for g in range(num_kv_heads) if rank < cut(world_size, g, num_kv_heads).slice.stop)
    ranks = cut(world_size, group, num_kv_heads)
    query = cut(group_size, rank - ranks.start, ranks.size)
    return HeadShard(Shard(group * group_size + query.start, query.size), Shard(group, 1))
