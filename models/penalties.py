"""Lowers the scores of tokens that a row already has. Counts them anew each time from the row's own tokens, so it keeps no state."""

import torch
import torch.nn.functional as F
from torch import Tensor

from loray.models.sampler import SamplingRows
from loray.models.to_device import to_device

LARGEST = 1e30  # of a score: divided by any temperature it stays a number, which a grammar's only token must have


def penalise(scores: Tensor, tokens: Tensor, rows: SamplingRows) -> Tensor:
    """Repetition as transformers defines it, over prompt and output; frequency and presence as OpenAI does, over the output.

    scores: [num_rows, vocab_size]; tokens: [num_rows, columns], of which each row has the first `position`.
    """
    vocab_size = scores.shape[1]
    names = "position", "num_prompt", "repetition_penalty", "frequency_penalty", "presence_penalty"
    position, num_prompt, penalty, frequency, presence = to_device(scores.device, *(rows[name][:, None] for name in names))
    scores = F.pad(scores, (0, 1))  # one column for what is not to be counted, and for tokens without a score
    places = torch.arange(tokens.shape[1], device=scores.device)
    seen_ids = tokens.long().clamp(max=vocab_size).masked_fill_(places >= position, vocab_size)
    seen = scores.gather(1, seen_ids)
    penalty = penalty.clamp(1 / LARGEST, LARGEST)
    scores.scatter_(1, seen_ids, _bounded(torch.where(seen < 0, seen * penalty, seen / penalty), seen))
    output_ids = seen_ids.masked_fill_(places < num_prompt, vocab_size)
    counts = torch.zeros_like(scores).scatter_add_(1, output_ids, scores.new_ones(output_ids.shape)).gather(1, output_ids)
    output = scores.gather(1, output_ids)
    lowered = output - frequency * counts - presence
    return scores.scatter_(1, output_ids, _bounded(lowered, output))[:, :vocab_size]


def _bounded(scores: Tensor, before: Tensor) -> Tensor:
    """What was impossible before stays it."""
    return torch.where(before.isinf(), before, scores.clamp(-LARGEST, LARGEST))
