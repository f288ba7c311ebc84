"""Gathers the log-probabilities of prompts, chunk by chunk, until a prompt is whole. Computes no logits."""

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from loray.models.sampler import bounded, most_probable
from loray.models.step import Admission, Alternatives
from loray.models.to_device import upload
from loray.models.to_host import ToHost

MAX_PIECE = 256  # tokens whose logits are in memory at once


@dataclass(slots=True)
class PromptScores:
    """One sequence's so far."""

    prompt_ids: list[int]
    num_alternatives: int
    num_scored: int = 0
    pieces: list[ToHost] = field(
        default_factory=list
    )  # log-probabilities [num_tokens]; token ids and theirs [num_tokens, num_alternatives]

    @property
    def logprobs(self) -> list[float]:
        """Of each prompt token but the first, once they have come."""
        return [value for piece in self.pieces for value in piece.wait()[0].tolist()]

    @property
    def alternatives(self) -> list[Alternatives]:
        """Likewise, where they are wanted."""
        found = (zip(*(tensor.tolist() for tensor in piece.wait()[1:]), strict=True) for piece in self.pieces)
        return [list(zip(ids, values, strict=True)) for pairs in found for ids, values in pairs]


class PromptLogprobs:
    def __init__(self) -> None:
        self._scores: dict[int, PromptScores] = {}  # by slot

    def __contains__(self, slot: int) -> bool:
        """Whether the slot's sequence wants them, and has not got them all."""
        return slot in self._scores

    def admit(self, admission: Admission) -> None:
        self._scores.pop(admission.slot, None)
        if admission.wants_prompt_logprobs:
            assert admission.num_computed == admission.num_output == 0, "they come of the whole prompt, with the first token"
            self._scores[admission.slot] = PromptScores(admission.token_ids, admission.sampling.num_prompt_alternatives)

    def add(self, slot: int, logits: Tensor) -> None:
        """logits: [num_tokens, vocab_size], of the slot's next tokens; those of the prompt's last one are not needed, and may be there."""
        scores = self._scores[slot]
        start = scores.num_scored + 1
        targets = upload(np.array(scores.prompt_ids[start : start + len(logits)], np.int64), logits.device)
        logits = logits[: len(targets)].float()
        if not len(targets):
            return
        scores.num_scored += len(targets)
        is_known = targets < logits.shape[1]  # a model may embed more tokens than its head can give
        chosen = logits.gather(1, targets.clamp(max=logits.shape[1] - 1)[:, None]).squeeze(1) - logits.logsumexp(-1)
        alternatives = most_probable(logits, scores.num_alternatives) if scores.num_alternatives else ()
        scores.pieces.append(ToHost(bounded(chosen.masked_fill(~is_known, float("-inf"))), *alternatives))

    def take(self, slots: list[int]) -> Iterator[tuple[int, PromptScores]]:
        """Of these slots, which get their first token now: place among them and scores, of those that want any."""
        for place, slot in enumerate(slots):
            if slot in self._scores:
                scores = self._scores.pop(slot)
                assert scores.num_scored == len(scores.prompt_ids) - 1, "the first token comes after the whole prompt"
                yield place, scores
