"""Which tokens the grammar of each slot allows next. Knows neither logits' meaning nor the steps; a slot's failure is its own."""

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from loray.kernels.drawing import NEVER
from loray.models.compiled_grammars import CompiledGrammars
from loray.models.model_folder import CheckpointError
from loray.models.step import RowFailure
from loray.models.to_device import sent

if TYPE_CHECKING:  # imported when the first grammar comes: few servers see one
    from xgrammar import GrammarMatcher

# An ambiguous grammar takes longer with every token, one that counts takes long, and all sequences wait. CPU seconds that it may take:
TOKEN_S = 0.05  # for each token; those of schemas take 1 ms with a vocabulary of 49,000, near the end of a limited string 20
SAVED_S = 0.5  # beyond that, while it has not used them up


class GrammarMasks:
    def __init__(self, model_path: Path, trust_remote_code: bool = False, is_timed: bool = True) -> None:
        self._is_timed = is_timed  # on one rank alone: clocks differ, and who answers must be the one to give up
        self.compiled = CompiledGrammars(model_path, trust_remote_code)
        self._matchers: dict[int, GrammarMatcher] = {}  # by slot
        self._seconds_left: dict[int, float] = {}  # by slot, of those with a matcher
        self.failures: dict[int, RowFailure] = {}  # by slot

    def admit(self, slot: int, grammar: bytes, output_ids: Sequence[int]) -> None:
        """grammar: as in Sampling; output_ids: what was generated under it so far."""
        self._matchers.pop(slot, None)
        self.failures.pop(slot, None)
        if not grammar:
            return
        import xgrammar

        try:
            self.compiled.vocabulary()
        except (CheckpointError, RuntimeError, ValueError, OSError) as error:
            self.failures[slot] = RowFailure(f"the vocabulary can't be read: {error}")
            return
        self._seconds_left[slot] = SAVED_S
        try:
            self._matchers[slot] = xgrammar.GrammarMatcher(self.compiled.get(grammar))
        except Exception as error:  # whatever it is, it is this sequence's alone
            self._blame(slot, f"can't be read: {error}")
        for token_id in output_ids:
            self._accept(slot, token_id)

    def holds(self, slots: Iterable[int]) -> bool:
        """Whether any of them follows a grammar, or failed to."""
        return bool(self._matchers or self.failures) and any(slot in self._matchers or slot in self.failures for slot in slots)

    def __contains__(self, slot: int) -> bool:
        return slot in self._matchers

    def accept_all(self, slots: Sequence[int], token_ids: Sequence[int]) -> None:
        """The sequences have one token more each."""
        if self._matchers:
            for slot, token_id in zip(slots, token_ids, strict=True):
                self._accept(slot, token_id)

    def _accept(self, slot: int, token_id: int) -> None:
        matcher = self._matchers.get(slot)
        if matcher is None or slot in self.failures or matcher.is_terminated():
            return
        self._seconds_left[slot] = min(SAVED_S, self._seconds_left[slot] + TOKEN_S)
        with self._timed(slot):
            is_allowed = matcher.accept_token(token_id)
        if not is_allowed:
            self.failures[slot] = RowFailure(f"the grammar does not allow token {token_id} where it was generated")
        if matcher.is_terminated():
            del self._matchers[slot]

    @contextmanager
    def _timed(self, slot: int) -> Iterator[None]:
        """A slot whose grammar takes too long fails."""
        start = time.thread_time()
        yield
        self._seconds_left[slot] -= time.thread_time() - start
        if self._is_timed and self._seconds_left[slot] < 0:
            self._blame(slot, f"takes too long: more than {1000 * TOKEN_S:g} ms a token; it is ambiguous, counts too far or is too large")

    def _blame(self, slot: int, reason: str) -> None:
        """Whoever wrote the grammar."""
        self.failures[slot] = RowFailure(f"the grammar {reason}", is_callers=True)

    def mask(self, scores: Tensor, slots: Sequence[int], unwanted: Sequence[Sequence[int]]) -> None:
        """In place, [num_rows, vocab_size]: what the grammar of a row's slot does not allow becomes impossible. So does what is unwanted,
        unless the grammar allows nothing else."""
        rows = [i for i, slot in enumerate(slots) if slot in self and slot not in self.failures]
        rows = [i for i in rows if not self._matchers[slots[i]].is_terminated()]  # such a row's token nobody reads
        if not rows:
            return
        import xgrammar

        num_known = self.compiled.vocabulary().vocab_size
        vocab_size = min(num_known, scores.shape[1])
        bits = xgrammar.allocate_token_bitmask(len(rows), num_known)  # [num_rows, words] int32
        for line, row in zip(bits, rows, strict=True):
            self._fill(line, slots[row], unwanted[row])
        places = sent(torch.tensor(rows), scores.device)
        masked = scores[places]
        xgrammar.apply_token_bitmask_inplace(masked, sent(bits, scores.device), vocab_size=vocab_size)
        masked[:, vocab_size:].fill_(NEVER)
        scores[places] = masked

    def _fill(self, line: Tensor, slot: int, unwanted: Sequence[int]) -> None:
        """line: [words] of the bitmask."""
        try:
            with self._timed(slot):
                self._matchers[slot].fill_next_token_bitmask(line[None])
        except RuntimeError as error:
            self._blame(slot, f"can't be followed: {error}")
            line.fill_(-1)
            return
        wanted = line.clone().numpy()
        for token_id in unwanted:
            if 0 <= token_id // 32 < len(wanted):
                wanted.view("uint32")[token_id // 32] &= ~(1 << token_id % 32) & 0xFFFFFFFF
        if wanted.any():
            line.copy_(torch.from_numpy(wanted))
        elif not line.any():
            self._blame(slot, "leads to where it allows none of the model's tokens")
            line.fill_(-1)
