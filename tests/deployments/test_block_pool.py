from loray.deployments.block_pool import BlockPool, chain_hash


def test_blocks_come_back_when_their_last_holder_lets_go() -> None:
    pool = BlockPool(4, 16)
    block_ids = pool.allocate(3)
    pool.publish(block_ids[0], b"h")
    assert pool.take_cached([b"h"]) == block_ids[:1]
    pool.release(block_ids)
    assert pool.num_used == 1
    pool.release(block_ids[:1])
    assert pool.num_used == 0


def test_a_cached_block_is_found_until_it_is_needed_for_something_else() -> None:
    pool = BlockPool(2, 16)
    first = pool.allocate(1)
    pool.publish(first[0], b"h")
    pool.release(first)
    pool.release(pool.allocate(1))
    assert pool.take_cached([b"h"]) == first, "empty blocks are taken before cached ones"
    pool.release(first)
    pool.allocate(2)
    assert pool.take_cached([b"h"]) == []


def test_empty_blocks_are_taken_before_cached_ones_that_came_back_earlier() -> None:
    pool = BlockPool(4, 16)
    cached, *empty = pool.allocate(4)
    pool.publish(cached, b"h")
    pool.release([cached])
    pool.release(empty)
    assert sorted(pool.allocate(3)) == empty
    assert pool.take_cached([b"h"]) == [cached]


def test_of_cached_blocks_the_least_recently_used_goes_first() -> None:
    pool = BlockPool(2, 16)
    a, b = pool.allocate(2)
    pool.publish(a, b"a")
    pool.publish(b, b"b")
    pool.release([a])
    pool.release([b])
    pool.release(pool.take_cached([b"a"]))
    pool.allocate(1)
    assert pool.take_cached([b"b"]) == [] and pool.take_cached([b"a"]) == [a]


def test_the_end_of_a_prefix_is_given_up_before_its_head() -> None:
    pool = BlockPool(2, 16)
    head, tail = pool.allocate(2)
    pool.publish(head, b"head")
    pool.publish(tail, b"tail")
    pool.release([head, tail])
    pool.allocate(1)
    assert pool.take_cached([b"head", b"tail"]) == [head]


def test_a_prefix_ends_at_the_first_missing_block() -> None:
    pool = BlockPool(4, 16)
    block_ids = pool.allocate(3)
    for block_id, name in zip(block_ids, (b"1", b"2", b"3"), strict=True):
        pool.publish(block_id, name)
    assert pool.take_cached([b"1", b"x", b"3"]) == block_ids[:1]


def test_the_hash_depends_on_the_adapter_on_every_token_and_on_their_order() -> None:
    hashes = {chain_hash(root, tokens) for root in (b"", b"v1", b"v2") for tokens in ([1, 2], [2, 1], [1, 3])}
    assert len(hashes) == 9


def test_without_a_cache_nothing_is_found_again() -> None:
    pool = BlockPool(2, 16, has_cache=False)
    held = pool.allocate(1)
    pool.publish(held[0], b"h")
    assert pool.take_cached([b"h"]) == [] and pool.num_cached == 0
    pool.release(held)
    assert pool.num_free == 2
