"""What each slot's sequence asks of its sampling, and the tokens that come of it. Computes no logits and knows no steps.

The order is transformers': penalties, biases, tokens that must not come yet, grammar, then temperature and filters (sampler.py).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from loray.kernels.drawing import NEVER
from loray.models.grammar_masks import GrammarMasks
from loray.models.parallel import Parallel
from loray.models.penalties import penalise
from loray.models.sampler import LOWEST_TEMPERATURE, SAMPLING_ROW, SamplingRows, most_probable, sample
from loray.models.step import Admission, Alternatives, Row, RowFailure, Sampling, Step
from loray.models.to_device import to_device
from loray.models.to_host import ToHost
from loray.models.watermark import green_bias

Ints = NDArray[np.int64]
HIGHEST_TEMPERATURE = 1e30  # infinity would make a number of what is impossible
MAX_TOKENS = 2**31  # no vocabulary has more
TOKENS_AT_ONCE = 1 << 21  # that are looked at for penalties: 90 MB


@dataclass(frozen=True, slots=True)
class Sampled:
    """One entry for each row of the logits."""

    token_ids: list[int]
    logprobs: list[float]
    alternatives: dict[int, Alternatives]  # of the rows that want them

    def ordered(self, rows: Sequence[int]) -> "Sampled":
        alternatives = {place: self.alternatives[row] for place, row in enumerate(rows) if row in self.alternatives}
        return Sampled([self.token_ids[row] for row in rows], [self.logprobs[row] for row in rows], alternatives)


@dataclass(frozen=True, slots=True)
class Drawn:
    """Sampled, but perhaps still on the device."""

    slots: list[int]
    tokens: ToHost  # ids and log-probabilities, [num_samples] each
    alternatives: ToHost  # ids and log-probabilities, [rows that want them, most of them] each
    num_alternatives: dict[int, int]  # row of the logits -> how many it wants


class SlotSampling:
    def __init__(self, tokens: Tensor, grammars: GrammarMasks, parallel: Parallel | None = None) -> None:
        self._tokens = tokens  # [max_running, columns] int32, on the device: each slot's prompt and output
        self._grammars = grammars
        self._parallel = parallel or Parallel()
        self._rows = np.zeros(len(tokens), SAMPLING_ROW)
        self._biases: dict[int, tuple[Ints, NDArray[np.float32]]] = {}  # slot -> token ids, and what is added to their logits
        self._stop_ids: dict[int, list[int]] = {}  # slot -> tokens that must not come before min_new_tokens

    def failed(self, rows: Sequence[Row]) -> dict[int, RowFailure]:
        """Those of a step's rows whose sequences cannot go on, and why."""
        failures = self._grammars.failures
        return {i: failures[row.slot] for i, row in enumerate(rows) if row.slot in failures} if failures else {}

    def admit(self, admissions: Sequence[Admission]) -> None:
        for admission in admissions:
            self._admit(admission)
        with_grammar = [admission.slot for admission in admissions if admission.sampling.grammar]
        if with_grammar:
            failures = self._grammars.failures
            flags = self._parallel.any_rank([slot in failures for slot in with_grammar], self._tokens.device)
            for slot, is_failed in zip(with_grammar, flags, strict=True):
                if is_failed:
                    failures.setdefault(slot, RowFailure("another rank can't read the grammar"))

    def _admit(self, admission: Admission) -> None:
        slot, sampling = admission.slot, admission.sampling
        num_prompt = len(admission.token_ids) - admission.num_output
        row = self._rows[slot]
        for name in ("top_k", "top_p", "typical_p", "seed", "min_new_tokens", "num_alternatives"):
            row[name] = getattr(sampling, name)
        for name in ("repetition_penalty", "frequency_penalty", "presence_penalty"):
            row[name] = getattr(sampling, name)
        row["temperature"] = min(sampling.temperature, HIGHEST_TEMPERATURE)
        row["num_prompt"], row["is_watermarked"], row["is_shaped"] = num_prompt, sampling.watermark, _is_shaped(sampling)
        self._stop_ids[slot] = sampling.stop_ids
        self._biases.pop(slot, None)
        biases = {token_id: bias for token_id, bias in sampling.logit_bias.items() if 0 <= token_id < MAX_TOKENS}
        if biases:
            self._biases[slot] = np.array(list(biases), np.int64), np.array(list(biases.values()), np.float32)
        self._grammars.admit(slot, sampling.grammar, admission.token_ids[num_prompt:])

    def is_plain(self, slots: Ints) -> bool:
        """Whether all of these take the most probable token and want no other."""
        rows = self._rows[slots]
        return bool(((rows["temperature"] <= LOWEST_TEMPERATURE) & ~rows["is_shaped"] & (rows["num_alternatives"] == 0)).all())

    def needs_tokens(self, step: Step) -> bool:
        """Whether the host must know tokens of the steps before: they decide what a grammar allows, and what a watermark prefers."""
        admitted = {admission.slot for admission in step.admissions}
        others = [row.slot for row in step.rows if row.slot not in admitted]
        is_bound = any(admission.sampling.grammar or admission.sampling.watermark for admission in step.admissions)
        return is_bound or self._grammars.holds(others) or bool(self._rows["is_watermarked"][others].any())

    def sample(self, logits: Tensor, slots: Ints, positions: Ints) -> Drawn:
        """The slots' next tokens, which become theirs. logits: [num_samples, vocab_size]; positions of the tokens to be sampled."""
        logits = logits.float()
        rows = self._rows[slots]
        rows["position"] = positions
        token_ids, logprobs = sample(logits, rows, self._scores(logits, slots, rows))
        wanting = (rows["num_alternatives"] > 0).nonzero()[0]
        places, wanted = self._upload(slots * self._tokens.shape[1] + positions, wanting)
        self._tokens.view(-1).index_copy_(0, places, token_ids.int())
        counts = dict(zip(wanting.tolist(), rows["num_alternatives"][wanting].tolist(), strict=True))
        alternatives = most_probable(logits[wanted], max(counts.values())) if counts else ()
        return Drawn(slots.tolist(), ToHost(token_ids, logprobs), ToHost(*alternatives), counts)

    def fetch(self, drawn: Drawn) -> Sampled:
        """Once for each draw, and before a slot of it is admitted anew where grammars are in use."""
        token_ids, logprobs = (tensor.tolist() for tensor in drawn.tokens.wait())
        self._grammars.accept_all(drawn.slots, token_ids)
        alternatives = {}
        if drawn.num_alternatives:
            found = zip(drawn.num_alternatives.items(), *(tensor.tolist() for tensor in drawn.alternatives.wait()), strict=True)
            alternatives = {row: list(zip(ids[:count], values[:count], strict=True)) for (row, count), ids, values in found}
        return Sampled(token_ids, logprobs, alternatives)

    def _scores(self, logits: Tensor, slots: Ints, rows: SamplingRows) -> Tensor:
        """The logits themselves where no row changes them before the temperature."""
        is_shaped = rows["is_shaped"]
        if not is_shaped.any():
            return logits
        (places,) = self._upload(is_shaped.nonzero()[0])
        return logits.index_copy(0, places, self._shape(logits[places], slots[is_shaped], rows[is_shaped]))

    def _shape(self, scores: Tensor, slots: Ints, rows: SamplingRows) -> Tensor:
        is_penalised = (rows["repetition_penalty"] != 1) | (rows["frequency_penalty"] != 0) | (rows["presence_penalty"] != 0)
        if is_penalised.any():
            self._penalise(scores, slots, rows, is_penalised.nonzero()[0])
        self._add_biases(scores, slots)
        if rows["is_watermarked"].any():
            before = slots * self._tokens.shape[1] + rows["position"] - 1
            places, previous = self._upload(rows["is_watermarked"].nonzero()[0], before[rows["is_watermarked"]])
            previous_ids = self._tokens.view(-1)[previous].tolist()  # a GPU is waited for here
            scores[places] += green_bias(previous_ids, scores.shape[1]).to(scores.device)
        is_young = rows["position"] - rows["num_prompt"] < rows["min_new_tokens"]
        unwanted = [self._stop_ids[slot] if young else [] for slot, young in zip(slots.tolist(), is_young.tolist(), strict=True)]
        self._grammars.mask(scores, slots.tolist(), unwanted)
        self._ban(scores, [[] if slot in self._grammars else ids for slot, ids in zip(slots.tolist(), unwanted, strict=True)])
        return scores

    def _penalise(self, scores: Tensor, slots: Ints, rows: SamplingRows, places: Ints) -> None:
        """A few places at once, if they have many tokens: no step takes more than a little beside what the first ones took."""
        num_rows = max(1, TOKENS_AT_ONCE // int(rows["position"][places].max()))
        for some in np.split(places, range(num_rows, len(places), num_rows)):
            where, its_slots = self._upload(some, slots[some])
            tokens = self._tokens[its_slots, : int(rows["position"][some].max())]
            scores[where] = penalise(scores[where], tokens, rows[some])

    def _add_biases(self, scores: Tensor, slots: Ints) -> None:
        found = [(row, *self._biases[slot]) for row, slot in enumerate(slots.tolist()) if slot in self._biases]
        if not found:
            return
        rows = np.repeat([row for row, *_ in found], [len(ids) for _, ids, _ in found])
        token_ids = np.concatenate([ids for _, ids, _ in found])
        values = np.concatenate([values for *_, values in found])
        is_known = token_ids < scores.shape[1]  # a token without a logit can't come anyway
        where, which, added = self._upload(rows[is_known], token_ids[is_known], values[is_known])
        scores[where, which] += added

    def _ban(self, scores: Tensor, token_ids: Sequence[Sequence[int]]) -> None:
        """token_ids: for each row those that must not come now."""
        pairs = [(row, token_id) for row, ids in enumerate(token_ids) for token_id in ids if 0 <= token_id < scores.shape[1]]
        if pairs:
            rows, columns = self._upload(*np.array(pairs, np.int64).T)
            scores.index_put_((rows, columns), scores.new_full((), NEVER))  # a number of the host's would be brought over, and waited for

    def _upload(self, *arrays: NDArray) -> tuple[Tensor, ...]:
        return to_device(self._tokens.device, *arrays)


def _is_shaped(sampling: Sampling) -> bool:
    """Whether anything changes its logits before the temperature."""
    is_penalised = (sampling.repetition_penalty, sampling.frequency_penalty, sampling.presence_penalty) != (1, 0, 0)
    is_bound = sampling.grammar != b"" or (sampling.min_new_tokens > 0 and bool(sampling.stop_ids))
    return is_penalised or is_bound or sampling.watermark or bool(sampling.logit_bias)
