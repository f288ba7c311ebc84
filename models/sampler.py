"""Picks the next token of each row from its logits. A row's token depends on its own logits, seed and position, never on its neighbours."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from loray.kernels.noise import gumbel_noise

LOWEST_TEMPERATURE = 1e-6  # below it the softmax is one-hot, and logits / temperature might overflow
LOWEST_LOGPROB = -9999.0  # stands for minus infinity: every logprob is finite


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """On the host, one entry for each row of the logits."""

    temperature: NDArray[np.float32]  # [num_samples] 0 = greedy
    top_k: NDArray[np.int64]  # [num_samples] 0 = off
    top_p: NDArray[np.float32]  # [num_samples] 1 = off
    seed: NDArray[np.uint64]  # [num_samples]
    position: NDArray[np.int64]  # [num_samples] of the token to be sampled, in its sequence


def sample(logits: Tensor, rows: SamplingRows) -> tuple[Tensor, Tensor]:
    """[num_samples, vocab_size] -> token ids [num_samples] int64 and their log-probabilities under the unwarped logits."""
    logits = logits.float()
    tokens = logits.argmax(-1)
    is_random = rows.temperature > LOWEST_TEMPERATURE
    if is_random.any():
        places = torch.from_numpy(is_random.nonzero()[0]).to(logits.device)
        tokens[places] = _sample_random(logits[places], _select(rows, is_random))
    chosen = logits.gather(1, tokens[:, None]).squeeze(1)
    logprobs = chosen - logits.logsumexp(-1)
    return tokens, torch.nan_to_num(logprobs, nan=LOWEST_LOGPROB, neginf=LOWEST_LOGPROB, posinf=LOWEST_LOGPROB)


def _sample_random(logits: Tensor, rows: SamplingRows) -> Tensor:
    """Gumbel-max: the largest of logit + noise is a draw from the softmax."""
    logits = logits / _column(rows.temperature, logits)
    is_filtered = (rows.top_k > 0) | (rows.top_p < 1)
    if is_filtered.any():
        places = torch.from_numpy(is_filtered.nonzero()[0]).to(logits.device)
        filtered = logits[places]
        logits[places] = filtered.masked_fill(filtered < _threshold(filtered, _select(rows, is_filtered)), float("-inf"))
    keys = torch.from_numpy(noise_keys(rows.seed, rows.position)).to(logits.device)
    return logits.add_(gumbel_noise(keys, logits.shape[1])).argmax(-1)


def _threshold(logits: Tensor, rows: SamplingRows) -> Tensor:
    """[num_rows, 1] the smallest logit that stays: top-k first, then top-p of what is left, as transformers does it."""
    vocab_size = logits.shape[1]
    top_k = np.where(rows.top_k > 0, np.minimum(rows.top_k, vocab_size), vocab_size)
    ordered = logits.topk(int(top_k.max())).values  # [num_rows, largest k], falling
    is_beyond_k = torch.arange(ordered.shape[1], device=logits.device) >= _column(top_k, ordered)
    probs = ordered.masked_fill(is_beyond_k, float("-inf")).softmax(-1)
    mass_before = probs.cumsum(-1) - probs
    is_dropped = is_beyond_k | (mass_before >= _column(rows.top_p, ordered))
    num_kept = (~is_dropped).sum(-1, keepdim=True).clamp_(min=1)
    return ordered.gather(1, num_kept - 1)


def noise_keys(seed: NDArray[np.uint64], position: NDArray[np.int64]) -> NDArray[np.int32]:
    """[num_rows, 2] int32: splitmix64 over (seed, position)."""
    with np.errstate(over="ignore"):
        x = _splitmix(_splitmix(seed.astype(np.uint64)) + position.astype(np.uint64))
    return x.view(np.int32).reshape(-1, 2)


def _splitmix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _select(rows: SamplingRows, mask: NDArray[np.bool_]) -> SamplingRows:
    return SamplingRows(rows.temperature[mask], rows.top_k[mask], rows.top_p[mask], rows.seed[mask], rows.position[mask])


def _column(values: NDArray, like: Tensor) -> Tensor:
    return torch.from_numpy(values).to(like.device)[:, None]
