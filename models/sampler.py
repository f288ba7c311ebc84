"""Draws the next token of each row from its scores. A row's token depends on its own scores, seed and position, never on its neighbours."""

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from loray.kernels.drawing import NEVER, draw, kept
from loray.kernels.greedy import bounded, most_and_total
from loray.models.to_device import to_device

LOWEST_TEMPERATURE = 1e-6  # below it the softmax is one-hot, and logits / temperature might overflow

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
        tokens, _ = most_and_total(scores)
    is_random = rows["temperature"] > LOWEST_TEMPERATURE
    if is_random.any():
        (places,) = to_device(scores.device, is_random.nonzero()[0])
        tokens[places] = _sample_random(scores[places], rows[is_random])
    chosen = logits.gather(1, tokens[:, None]).squeeze(1)
    return tokens, bounded(chosen - totals)


def most_probable(logits: Tensor, num_tokens: int) -> tuple[Tensor, Tensor]:
    """[num_rows, vocab_size] float32 -> token ids and log-probabilities, [num_rows, num_tokens] each, falling."""
    found = logits.topk(min(num_tokens, logits.shape[1]))
    return found.indices, bounded(found.values - logits.logsumexp(-1, keepdim=True))


def _sample_random(scores: Tensor, rows: SamplingRows) -> Tensor:
    is_typical = rows["typical_p"] < 1
    if is_typical.any():
        scores, rows = _with_typical(scores, rows, is_typical)
    limits = rows["temperature"], rows["top_k"], rows["top_p"], noise_keys(rows["seed"], rows["position"])
    return draw(scores, *to_device(scores.device, *limits))


def _with_typical(scores: Tensor, rows: SamplingRows, is_typical: NDArray[np.bool_]) -> tuple[Tensor, SamplingRows]:
    """The same with typical tokens alone, in rows that want them, and nothing left to be done to those but the draw."""
    some = rows[is_typical]
    places, temperature, *limits = to_device(
        scores.device, is_typical.nonzero()[0], *(some[name] for name in ("temperature", "top_k", "top_p"))
    )
    chosen = scores[places] / temperature[:, None]
    if ((some["top_k"] > 0) | (some["top_p"] < 1)).any():
        chosen = kept(chosen, *limits)
    rows = rows.copy()
    for name, off in (("temperature", 1), ("top_k", 0), ("top_p", 1)):
        rows[name][is_typical] = off
    return scores.index_copy(0, places, _typical(chosen, some)), rows


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
