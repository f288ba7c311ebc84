"""Draws the next token of each row from its scores. A row's token depends on its own scores, seed and position, never on its neighbours."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from loray.kernels.greedy import finite, most_and_total
from loray.kernels.noise import gumbel_noise
from loray.models.to_device import to_device

FIRST_TOKENS = 1024  # that are looked at for top-p before the whole vocabulary is
MAX_ORDERED = 64  # rows whose whole vocabulary a GPU sorts at once: that takes some ten times the memory of their scores
LOWEST_TEMPERATURE = 1e-6  # below it the softmax is one-hot, and logits / temperature might overflow
NEVER = float("-inf")

SAMPLING_ROW = np.dtype(
    [
        ("temperature", np.float32),  # 0 = greedy
        ("top_k", np.int64),  # 0 = off
        ("top_p", np.float32),  # 1 = off
        ("typical_p", np.float32),  # 1 = off
        ("seed", np.uint64),
        ("position", np.int64),  # of the token to be sampled, in its sequence
        ("num_prompt", np.int64),  # tokens before the first that was generated
        ("repetition_penalty", np.float32),  # 1 = off
        ("frequency_penalty", np.float32),  # 0 = off
        ("presence_penalty", np.float32),  # 0 = off
        ("min_new_tokens", np.int64),  # 0 = off
        ("num_alternatives", np.int64),
        ("is_watermarked", np.bool_),
        ("is_shaped", np.bool_),  # its logits are changed before the temperature
    ]
)
SamplingRows = NDArray[np.void]  # [num_samples] of SAMPLING_ROW, on the host


def sample(logits: Tensor, rows: SamplingRows, scores: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Token ids [num_samples] int64, and their log-probabilities under the logits.

    logits: [num_samples, vocab_size] float32; scores: the same as the rows have shaped them, where tokens are to come from.
    """
    tokens, totals = most_and_total(logits)
    scores = logits if scores is None else scores
    if scores is not logits:
        tokens = scores.argmax(-1)
    is_random = rows["temperature"] > LOWEST_TEMPERATURE
    if is_random.any():
        (places,) = to_device(scores.device, is_random.nonzero()[0])
        tokens[places] = _sample_random(scores[places], rows[is_random])
    chosen = logits.gather(1, tokens[:, None]).squeeze(1)
    return tokens, finite(chosen - totals)


def most_probable(logits: Tensor, num_tokens: int) -> tuple[Tensor, Tensor]:
    """[num_rows, vocab_size] float32 -> token ids and log-probabilities, [num_rows, num_tokens] each, falling."""
    found = logits.topk(min(num_tokens, logits.shape[1]))
    return found.indices, finite(found.values - logits.logsumexp(-1, keepdim=True))


def _sample_random(scores: Tensor, rows: SamplingRows) -> Tensor:
    """Gumbel-max: the largest of score + noise is a draw from the softmax."""
    is_filtered = (rows["top_k"] > 0) | (rows["top_p"] < 1)
    is_typical = rows["typical_p"] < 1
    known = rows["temperature"], noise_keys(rows["seed"], rows["position"]), is_filtered.nonzero()[0], is_typical.nonzero()[0]
    temperature, keys, filtered, typical = to_device(scores.device, *known)
    scores = scores / temperature[:, None]
    if len(filtered):
        some = scores[filtered]
        scores[filtered] = some.masked_fill(some < _threshold(some, rows[is_filtered]), NEVER)
    if len(typical):
        scores[typical] = _typical(scores[typical], rows[is_typical])
    return scores.add_(gumbel_noise(keys, scores.shape[1])).argmax(-1)


def _threshold(scores: Tensor, rows: SamplingRows) -> Tensor:
    """[num_rows, 1] the smallest score that stays: top-k first, then top-p of what is left, as transformers does it."""
    vocab_size = scores.shape[1]
    top_k = np.where(rows["top_k"] > 0, np.minimum(rows["top_k"], vocab_size), vocab_size)
    find = _threshold_asked if scores.device.type == "cpu" else _threshold_unasked
    return find(scores, top_k, rows["top_p"])


def _threshold_asked(scores: Tensor, top_k: NDArray[np.int64], top_p: NDArray[np.float32]) -> Tensor:
    """Few tokens have most of the mass, so the whole vocabulary is put in order only for rows where they have not."""
    limits = [limit[:, None] for limit in to_device(scores.device, top_k, top_p)]
    threshold, is_enough = _threshold_among(scores, _falling(scores, FIRST_TOKENS), *limits)
    if not is_enough.all():
        places = (~is_enough).nonzero()[:, 0]
        some = scores[places]
        threshold[places], _ = _threshold_among(some, _falling(some, scores.shape[1]), *(limit[places] for limit in limits))
    return threshold


def _threshold_unasked(scores: Tensor, top_k: NDArray[np.int64], top_p: NDArray[np.float32]) -> Tensor:
    """The same without a look at what the scores are, for which the host would wait: the whole vocabulary is put in order for rows where
    that might be needed."""
    is_short = top_k <= FIRST_TOKENS
    short, long, *limits = to_device(scores.device, is_short.nonzero()[0], (~is_short).nonzero()[0], top_k[:, None], top_p[:, None])
    threshold = scores.new_empty(len(scores), 1)
    if len(short):
        some = scores[short]
        threshold[short], _ = _threshold_among(some, _falling(some, FIRST_TOKENS), *(limit[short] for limit in limits))
    for first in range(0, len(long), MAX_ORDERED):
        places = long[first : first + MAX_ORDERED]
        threshold[places] = _threshold_in_order(scores[places], *(limit[places] for limit in limits))
    return threshold


def _threshold_in_order(scores: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """[num_rows, 1]. What the first tokens tell counts where they do: by another sum a token at the edge might fall out."""
    ordered = _falling(scores, scores.shape[1])
    threshold, is_enough = _threshold_among(scores, ordered[:, :FIRST_TOKENS], top_k, top_p)
    return torch.where(is_enough[:, None], threshold, _threshold_among(scores, ordered, top_k, top_p)[0])


def _falling(scores: Tensor, num_tokens: int) -> Tensor:
    """[num_rows, num_tokens], the largest scores; all of them where there are no more."""
    if num_tokens < scores.shape[1]:
        return scores.topk(num_tokens).values
    return scores.sort(descending=True).values


def _threshold_among(scores: Tensor, ordered: Tensor, top_k: Tensor, top_p: Tensor) -> tuple[Tensor, Tensor]:
    """The threshold, [num_rows, 1], as far as the most probable tokens tell, and whether they do, [num_rows].

    ordered: [num_rows, num_tokens] their scores, falling; top_k, at most vocab_size, and top_p: [num_rows, 1].
    """
    num_tokens, vocab_size = ordered.shape[1], scores.shape[1]
    is_beyond_k = torch.arange(num_tokens, device=scores.device) >= top_k
    ordered = ordered.masked_fill(is_beyond_k, NEVER)
    all_scores = ordered.logsumexp(-1, keepdim=True)
    if num_tokens < vocab_size:
        all_scores = torch.where(top_k <= num_tokens, all_scores, scores.logsumexp(-1, keepdim=True))
    probs = (ordered - all_scores).exp()
    mass_before = probs.cumsum(-1) - probs
    is_dropped = is_beyond_k | (mass_before >= top_p)
    num_kept = (~is_dropped).sum(-1, keepdim=True).clamp_(min=1)
    is_enough = (top_k <= num_tokens) | ((top_k == vocab_size) & (num_kept < num_tokens))
    return ordered.gather(1, num_kept - 1), is_enough.squeeze(1)


def _typical(scores: Tensor, rows: SamplingRows) -> Tensor:
    """Keeps the tokens whose surprise is nearest to the entropy, until they have the mass typical_p; as transformers does it."""
    (typical_p,) = to_device(scores.device, rows["typical_p"][:, None])
    logprobs = scores.log_softmax(-1)
    entropy = -(logprobs * logprobs.exp()).nansum(-1, keepdim=True)
    distance = (-logprobs - entropy).abs()
    ordered, order = distance.sort(-1)
    mass = scores.gather(1, order).softmax(-1).cumsum(-1)
    last = (mass < typical_p).sum(-1, keepdim=True).clamp_(max=scores.shape[1] - 1)
    return scores.masked_fill(distance > ordered.gather(1, last), NEVER)


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
