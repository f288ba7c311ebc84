"""Scales for a KV cache in float8, from a prompt that is computed once with a cache in the model's dtype. Knows no requests."""

import logging
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from loray.models.kv_cache import FLOAT8, KVCache

logger = logging.getLogger("loray.kv_scales")
NUM_TOKENS = 512  # of the prompt
HEADROOM = 2.0  # other prompts may have larger keys and values; one bit of the exponent is no loss


def random_prompt(vocab_size: int, num_tokens: int) -> list[int]:
    """The same on every rank and at every start."""
    return np.random.default_rng(0).integers(0, vocab_size, num_tokens).tolist()


def measured_scales(make_cache: Callable[[Tensor | None], KVCache], logits: Callable[[KVCache], Tensor]) -> Tensor:
    """[num_layers, 2] float32. make_cache: with these scales, for the whole prompt; logits: of some of its tokens, with an empty cache."""
    exact_cache = make_cache(None)
    exact = logits(exact_cache)
    scales = (exact_cache.largest() * (HEADROOM / torch.finfo(FLOAT8).max)).clamp_(min=torch.finfo(torch.float32).tiny)
    error = (logits(make_cache(scales)) - exact).float()
    logger.info(
        "the KV cache is in float8: logits after a random prompt change by %.4f on average, at most %.4f; their spread is %.4f",
        *(error.abs().mean(), error.abs().max(), exact.float().std()),
    )
    return scales
