"""A watermark: half of the vocabulary, chosen by the token before, becomes more likely. Found again by transformers' WatermarkDetector
with greenlist_ratio 0.5, hashing_key 15485863, seeding_scheme "lefthash" and context_width 1, on a CPU."""

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

GREEN_SHARE = 0.5
GREEN_BIAS = 2.0
HASH_KEY = 15485863
MAX_KEPT = 128  # lists; one takes milliseconds to draw, and half a megabyte for a vocabulary of 128k


def green_bias(previous_ids: Sequence[int], vocab_size: int) -> Tensor:
    """[num_rows, vocab_size] float32 on the host, whatever the device: another's generator would draw other tokens."""
    bias = torch.zeros(len(previous_ids), vocab_size)
    for row, previous_id in zip(bias, previous_ids, strict=True):
        row[_green_ids(previous_id, vocab_size)] = GREEN_BIAS
    return bias


@lru_cache(MAX_KEPT)
def _green_ids(previous_id: int, vocab_size: int) -> Tensor:
    generator = torch.Generator().manual_seed(HASH_KEY * previous_id)
    return torch.randperm(vocab_size, generator=generator)[: int(vocab_size * GREEN_SHARE)].clone()  # without the other half's memory
