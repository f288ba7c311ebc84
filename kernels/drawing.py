"""Draws a token of each row from the softmax of its scores. Plain torch; on a GPU drawing_triton.py does it."""

import torch
from torch import Tensor

from loray.kernels.noise import gumbel_noise

FIRST_TOKENS = 1024  # that are looked at for top-p before the whole vocabulary is
MAX_ORDERED = 64  # rows whose whole vocabulary a GPU sorts at once: that takes some ten times the memory of their scores
NEVER = float("-inf")


def draw(scores: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, keys: Tensor) -> Tensor:
    """[num_rows] int64. Gumbel-max: the largest of score + noise is a draw from the softmax.

    scores [num_rows, vocab_size]; temperature, never 0, and top_p, 1 = off, [num_rows] float32; top_k, 0 = off, [num_rows] int64;
    keys [num_rows, 2] int32 of the noise. Where scores are NaN any token may come.
    """
    if scores.is_cuda:
        from loray.kernels.drawing_triton import draw as on_gpu  # needs Triton, which a machine without a GPU may lack

        return on_gpu(scores, temperature, top_k, top_p, keys)
    scores = scores.float() / temperature[:, None]
    filtered = ((top_k > 0) | (top_p < 1)).nonzero()[:, 0]
    if len(filtered):
        scores[filtered] = kept(scores[filtered], top_k[filtered], top_p[filtered])
    return scores.add_(gumbel_noise(keys, scores.shape[1])).argmax(-1)


def kept(scores: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """The scores that stay, of the others NEVER: top-k first, then top-p of what is left, as transformers does it.

    scores [num_rows, vocab_size] float32; top_k, 0 = off, [num_rows] int64; top_p, 1 = off, [num_rows] float32.
    """
    vocab_size = scores.shape[1]
    top_k = torch.where(top_k > 0, top_k, vocab_size).clamp_(max=vocab_size)
    find = _threshold_asked if scores.device.type == "cpu" else _threshold_unasked
    return scores.masked_fill(scores < find(scores, top_k[:, None], top_p[:, None]), NEVER)


def _threshold_asked(scores: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """[num_rows, 1] the smallest score that stays. top_k, at most vocab_size, and top_p: [num_rows, 1].

    Few tokens have most of the mass, so the whole vocabulary is put in order only for rows where they have not."""
    threshold, is_enough = _threshold_among(scores, _falling(scores, FIRST_TOKENS), top_k, top_p)
    if not is_enough.all():
        places = (~is_enough).nonzero()[:, 0]
        some = scores[places]
        threshold[places], _ = _threshold_among(some, _falling(some, scores.shape[1]), top_k[places], top_p[places])
    return threshold


def _threshold_unasked(scores: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """The same without a look at what the scores are, for which the host would wait: the whole vocabulary is put in order."""
    pieces = zip(*(tensor.split(MAX_ORDERED) for tensor in (scores, top_k, top_p)), strict=True)
    return torch.cat([_threshold_in_order(*piece) for piece in pieces])


def _threshold_in_order(scores: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """What the first tokens tell counts where they do: by another sum a token at the edge might fall out."""
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

    ordered: [num_rows, num_tokens] their scores, falling.
    """
    num_tokens, vocab_size = ordered.shape[1], scores.shape[1]
    is_beyond_k = torch.arange(num_tokens, device=scores.device) >= top_k
    ordered = ordered.masked_fill(is_beyond_k, NEVER)
    all_scores = ordered.logsumexp(-1, keepdim=True)
    if num_tokens < vocab_size:
        all_scores = torch.where(top_k <= num_tokens, all_scores, scores.logsumexp(-1, keepdim=True))
    probs = (ordered - all_scores).exp()
    mass_before = probs.cumsum(-1) - probs
    is_dropped = is_beyond_k | ((top_p < 1) & (mass_before >= top_p))
    num_kept = (~is_dropped).sum(-1, keepdim=True).clamp_(min=1)
    is_enough = (top_k <= num_tokens) | ((top_k == vocab_size) & (num_kept < num_tokens))
    return ordered.gather(1, num_kept - 1), is_enough.squeeze(1)
