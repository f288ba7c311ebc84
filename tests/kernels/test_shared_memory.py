"""What attention needs of shared memory, against what Triton 3.9 asked for when it compiled the kernels for compute capability 8.9."""

import pytest
import torch

from loray.kernels.shared_memory import fitting_keys, needed_bytes, shared_bytes

AT_8_9, AT_8_0, AT_9_0 = 99 << 10, 163 << 10, 227 << 10  # of one program
COMPILED = {  # rows, keys, dims, tiles, bytes of an element of queries and cache -> bytes
    "prefill, bfloat16": ((64, 64, 256, 1, (2, 2)), 106_752),
    "prefill, half the keys": ((64, 32, 256, 1, (2, 2)), 69_760),
    "prefill, float8": ((64, 64, 256, 1, (2, 1)), 73_984),
    "prefill, float32": ((32, 16, 256, 1, (4, 4)), 67_776),
    "decode, bfloat16": ((16, 64, 128, 2, (2, 2)), 72_192),
    "decode, bfloat16, 64 heads of 256 to a key": ((64, 32, 256, 2, (2, 2)), 102_656),
    "decode, float32, 32 heads of 256 to a key": ((32, 16, 256, 2, (4, 4)), 100_608),
    "decode, float32 over float8, 4 heads of 256 to a key": ((16, 32, 256, 2, (4, 1)), 84_288),
    "decode, float32 over float8, 32 heads of 256 to a key": ((32, 16, 256, 2, (4, 1)), 67_840),
}


@pytest.mark.parametrize("name", COMPILED)
def test_what_is_needed_is_a_little_more_than_what_was_compiled(name: str) -> None:
    shape, compiled = COMPILED[name]
    assert compiled <= needed_bytes(*shape) <= compiled + 1024


@pytest.mark.parametrize(("num_bytes", "keys"), [(AT_8_9, 32), (AT_8_0, 64), (AT_9_0, 64)])
def test_prompts_with_heads_of_256_take_fewer_keys_at_once_where_they_must(num_bytes: int, keys: int) -> None:
    assert fitting_keys(64, 64, 256, 1, (2, 2), num_bytes) == keys


def test_keys_are_never_fewer_than_tensor_cores_multiply() -> None:
    assert fitting_keys(64, 64, 256, 1, (2, 2), 1) == 16


def test_without_a_gpu_there_is_no_limit() -> None:
    assert shared_bytes(torch.device("cpu")) > AT_9_0
