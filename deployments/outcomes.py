"""What a finished step brought to its sequences: fields of their next TokenEvents, or errors. Changes no sequence and sends nothing."""

import math
from typing import Any

from loray.deployments.errors import AdapterFailed, GrammarFailed, Incomplete, LorayError
from loray.deployments.plan import Plan
from loray.deployments.sequence import Sequence
from loray.models.step import StepResult


def outcomes(plan: Plan, result: StepResult) -> dict[Sequence, dict[str, Any]]:
    """To be asked before the tokens are given to the sequences. Finish reasons are not known yet."""
    found: dict[Sequence, dict[str, Any]] = {}
    for place, (sequence, token_id, logprob) in enumerate(zip(plan.sampled, result.token_ids, result.logprobs, strict=True)):
        fields = found[sequence] = {"token_ids": [token_id], "logprobs": [logprob], "num_before": sequence.num_output}
        if place in result.alternatives:
            fields["alternatives"] = [result.alternatives[place]]
        if sequence.num_output == 0:
            fields["queue_s"] = sequence.queue_s
            fields["prompt_logprobs"] = result.prompt_logprobs.get(place, [])
            fields["prompt_alternatives"] = result.prompt_alternatives.get(place, [])
    for sequence, embedding in zip(plan.pooled, result.embeddings, strict=True):
        found[sequence] = {"embedding": embedding, "queue_s": sequence.queue_s}
    return found


def failures(plan: Plan, result: StepResult) -> dict[Sequence, LorayError]:
    """Of the sequences that cannot go on."""
    found: dict[Sequence, LorayError] = {}
    for sequence, logprob in zip(plan.sampled, result.logprobs, strict=True):
        if math.isnan(logprob):  # where there is no distribution
            found[sequence] = _not_finite(sequence)
    for sequence, embedding in zip(plan.pooled, result.embeddings, strict=True):
        if not math.isfinite(sum(embedding)):  # of single precision: no sum of these overflows
            found[sequence] = _not_finite(sequence)
    for index, failure in result.failed_rows.items():
        found[list(plan.rows)[index]] = GrammarFailed(failure.reason) if failure.is_callers else Incomplete(failure.reason)
    return found


def _not_finite(sequence: Sequence) -> LorayError:
    if not sequence.adapter:
        return Incomplete("the model's numbers for this text are not finite")
    return AdapterFailed(
        f"adapter {sequence.adapter.adapter_id!r}: the model's numbers with it are not finite; its weights may be far too large"
    )
