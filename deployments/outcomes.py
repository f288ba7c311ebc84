"""What a finished step brought to each of its sequences, as fields of their next TokenEvent. Changes no sequence and sends nothing."""

from typing import Any

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
