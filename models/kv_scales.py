"""Scales for a KV cache in float8, from a prompt that is computed once with a cache in the model's dtype. Knows no requests."""

import logging
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from loray.models.kv_cache import FLOAT8, KVCache

logger = logging.getLogger("loray.kv_scales")
NUM_TOKENS = 512  # of the prompt
MakeCache = Callable[[Tensor | None], KVCache]
HEADROOM = 2.0  # other prompts may have larger keys and values; one bit of the exponent is no loss


def random_prompt(vocab_size: int, num_tokens: int) -> list[int]:
    """The same on every rank and at every start."""
    return np.random.default_rng(0).integers(0, vocab_size, num_tokens).tolist()


def measured_scales(make_cache: MakeCache, logits: Callable[[KVCache], Tensor], all_fit: Callable[[Callable[[], object]], bool]) -> Tensor:
    """[num_layers, 2] float32. make_cache: with these scales, for the whole prompt; logits: of some of its tokens, with an empty cache;
    all_fit: tries a thing and says whether no rank ran out of memory."""

    def measure() -> tuple[Tensor, Tensor, Tensor]:
        exact_cache = make_cache(None)
        exact = logits(exact_cache)
        scales = (exact_cache.largest() * (HEADROOM / torch.finfo(FLOAT8).max)).clamp_(min=torch.finfo(torch.float32).tiny)
        return scales, exact, (logits(make_cache(scales)) - exact).float()

    if not all_fit(measure):
        raise MemoryError("there is no room for the prompt that the float8 cache is fitted to; lower adapters.gpu_bytes")
    scales, exact, error = measure()
    logger.info(
        "the KV cache is in float8: logits after a random prompt change by %.4f on average, at most %.4f; their spread is %.4f",
        *(error.abs().mean(), error.abs().max(), exact.float().std()),
    )
    return scales
