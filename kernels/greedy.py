"""The most probable token of each row and its log-probability. Plain torch; on a GPU greedy_triton.py does it,
on a CPU native.c where it can."""

import torch
from torch import Tensor

from loray.kernels import native

LOWEST_LOGPROB = -9999.0  # also of a token that can't come at all


def greedy(logits: Tensor) -> tuple[Tensor, Tensor]:
    """argmax(logits), the lowest id among equals, [num_rows] int64; log_softmax(logits) at it, [num_rows] float32.

    logits [num_rows, vocab_size]. NaN counts as minus infinity for the argmax. Where there is no distribution, the log-probability is NaN.
    """
    if logits.is_cuda:
        from loray.kernels.greedy_triton import greedy as on_gpu  # needs Triton, which a machine without a GPU may lack

        return on_gpu(logits)
    logits = logits.float()
    tokens, totals = most_and_total(logits)
    chosen = logits.gather(1, tokens[:, None]).squeeze(1)
    if chosen.isnan().any():  # argmax takes NaN for the largest
        tokens = logits.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf).argmax(-1)
        chosen = logits.gather(1, tokens[:, None]).squeeze(1)
    return tokens, bounded(chosen - totals)


def most_and_total(logits: Tensor) -> tuple[Tensor, Tensor]:
    """argmax(logits), int64, anything where there is NaN, and logsumexp(logits), [num_rows] each. logits [num_rows, vocab_size] float32."""
    if logits.is_cuda:
        from loray.kernels.greedy_triton import most_and_total as on_gpu

        return on_gpu(logits)
    if native.serves(logits.device, logits.dtype):
        return native.most_and_total(logits)
    return logits.argmax(-1), logits.logsumexp(-1)


def bounded(logprobs: Tensor) -> Tensor:
    """NaN stays: there is no distribution."""
    return logprobs.clamp(min=LOWEST_LOGPROB)
