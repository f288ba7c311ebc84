"""A watermark: half of the vocabulary, chosen by the token before, becomes more likely. Found again by transformers' WatermarkDetector
with greenlist_ratio 0.5, hashing_key 15485863, seeding_scheme "lefthash" and context_width 1, on a CPU."""

from collections.abc import Sequence

import torch
from torch import Tensor

GREEN_SHARE = 0.5
GREEN_BIAS = 2.0
HASH_KEY = 15485863


def green_bias(previous_ids: Sequence[int], vocab_size: int) -> Tensor:
    """[num_rows, vocab_size] float32 on the host, whatever the device: another's generator would draw other tokens."""
    bias = torch.zeros(len(previous_ids), vocab_size)
    generator = torch.Generator()
    for row, previous_id in zip(bias, previous_ids, strict=True):
        generator.manual_seed(HASH_KEY * previous_id)
        row[torch.randperm(vocab_size, generator=generator)[: int(vocab_size * GREEN_SHARE)]] = GREEN_BIAS
    return bias
