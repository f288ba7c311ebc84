"""What fits into the shared memory of a GPU's multiprocessor, of which models differ: 99 KB at 8.6, 8.9 and 12.0, 163 at 8.0, 227 at 9.0.

Arithmetic alone; imports no Triton.
"""

from functools import cache

import torch

LEAST_KEYS = 16  # that tensor cores multiply
SPARE_BYTES = 1024  # for sums across warps


@cache
def shared_bytes(device: torch.device) -> int:
    """That one program may have."""
    if device.type != "cuda":
        return 1 << 30
    return int(torch.cuda.get_device_properties(device).shared_memory_per_block_optin)  # type: ignore[attr-defined]


def needed_bytes(rows: int, keys: int, dims: int, num_tiles: int, sizes: tuple[int, int]) -> int:
    """Of attention: the queries, their weights of a tile of keys, as many tiles of keys and of values as are under way, and one that is
    widened to float32 where the cache has less.

    sizes: bytes of an element of the queries, and of the cache. Triton 3.9 asks for no more, compiling for 8.6 and 8.9."""
    q_size, kv_size = sizes
    widened = keys * dims * q_size if kv_size < q_size == 4 else 0
    return rows * (dims + keys) * q_size + 2 * num_tiles * keys * dims * kv_size + widened + SPARE_BYTES


def fitting_keys(most: int, rows: int, dims: int, num_tiles: int, sizes: tuple[int, int], num_bytes: int) -> int:
    """Keys of a tile: `most`, or half as many, as often as it takes to fit into so many bytes."""
    keys = most
    while keys > LEAST_KEYS and needed_bytes(rows, keys, dims, num_tiles, sizes) > num_bytes:
        keys //= 2
    return keys
