"""Hands out KV blocks by number, counts who holds them, and finds blocks again whose tokens are already computed.

Knows neither tensors nor requests. A block is found again by a chained hash over (adapter version, all token ids up to its
end), so two adapters, or two versions of one, never share a block.
"""

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence as List

BlockHash = bytes


def chain_hash(previous: BlockHash, token_ids: List[int]) -> BlockHash:
    """The hash of a full block that follows the block hashed `previous` (or the adapter's version at the start)."""
    return hashlib.blake2b(previous + array("i", token_ids).tobytes(), digest_size=16).digest()


class BlockPool:
    """With `has_cache` off no block is ever found again; for ranks that only count blocks and keep nothing in them."""

    def __init__(self, num_blocks: int, block_size: int, has_cache: bool = True) -> None:
        assert num_blocks > 0, "a pool has at least one block"
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._has_cache = has_cache
        self._references = [0] * num_blocks
        self._hash_of: dict[int, BlockHash] = {}
        self._block_of: dict[BlockHash, int] = {}
        # Unreferenced blocks, next to be taken first: empty ones, then cached ones, least recently used first.
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_blocks - len(self._free)

    @property
    def num_cached(self) -> int:
        return len(self._block_of)

    def num_needed(self, num_tokens: int) -> int:
        """Blocks that hold num_tokens tokens."""
        return -(-num_tokens // self.block_size)

    def allocate(self, count: int) -> list[int]:
        assert count <= len(self._free), "the caller checks num_free first"
        block_ids = [self._free.popitem(last=False)[0] for _ in range(count)]
        for block_id in block_ids:
            self._references[block_id] = 1
            self._forget(block_id)
        return block_ids

    def release(self, block_ids: List[int]) -> None:
        # From the end: the head of a prefix is the likeliest to be wanted again, so it is taken last.
        for block_id in reversed(block_ids):
            self._references[block_id] -= 1
            assert self._references[block_id] >= 0, "a block is released as often as it was taken"
            if self._references[block_id] == 0:
                self._free[block_id] = None
                if block_id not in self._hash_of:
                    self._free.move_to_end(block_id, last=False)

    def take_cached(self, hashes: List[BlockHash]) -> list[int]:
        """The longest run of cached blocks for these hashes, from the first on; each is now held by the caller too."""
        block_ids = []
        for block_hash in hashes:
            block_id = self._block_of.get(block_hash)
            if block_id is None:
                break
            if self._references[block_id] == 0:
                del self._free[block_id]
            self._references[block_id] += 1
            block_ids.append(block_id)
        return block_ids

    def publish(self, block_id: int, block_hash: BlockHash) -> None:
        """This held block is full; whoever needs the same tokens may share it. The first of two equal blocks is kept."""
        assert self._references[block_id] > 0, "only a held block is published"
        if self._has_cache and block_hash not in self._block_of:
            self._forget(block_id)
            self._block_of[block_hash] = block_id
            self._hash_of[block_id] = block_hash

    def _forget(self, block_id: int) -> None:
        block_hash = self._hash_of.pop(block_id, None)
        if block_hash is not None:
            del self._block_of[block_hash]
