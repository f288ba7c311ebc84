"""Which tokens the grammar of each slot allows next. Knows neither logits' meaning nor the steps; a slot's failure is its own."""

import hashlib
import threading
import time
import zlib
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from loray.models.grammar_vocabulary import grammar_vocabulary
from loray.models.model_folder import CheckpointError
from loray.models.sampler import NEVER
from loray.models.step import RowFailure

if TYPE_CHECKING:  # imported when the first grammar comes: few servers see one
    from xgrammar import CompiledGrammar, GrammarMatcher, TokenizerInfo

MAX_COMPILED = 64  # grammars that are kept, whether or not anybody uses them
MAX_COMPILED_BYTES = 64 * 2**20  # of them as JSON, of which a MiB takes 25 ms to read
# An ambiguous grammar takes longer with every token, one that counts far takes long, and all sequences wait. CPU seconds that it may take:
TOKEN_S = 0.05  # for each token; a string of at most 400 characters takes 20 ms with a vocabulary of 49,000
SAVED_S = 0.5  # beyond that, while it has not used them up


class GrammarMasks:
    def __init__(self, model_path: Path, trust_remote_code: bool = False, is_timed: bool = True) -> None:
        self._is_timed = is_timed  # on one rank alone: clocks differ, and who answers must be the one to give up
        self._model_path = model_path
        self._trust_remote_code = trust_remote_code
        self._vocabulary: TokenizerInfo | None = None
        self._reading = threading.Lock()  # over the vocabulary, until it is there
        self._compiled: OrderedDict[bytes, tuple[CompiledGrammar, int]] = (
            OrderedDict()
        )  # with its bytes, by hash, least recently used first
        self._num_compiled_bytes = 0
        self._matchers: dict[int, GrammarMatcher] = {}  # by slot
        self._seconds_left: dict[int, float] = {}  # by slot, of those with a matcher
        self.failures: dict[int, RowFailure] = {}  # by slot

    def vocabulary(self) -> "TokenizerInfo":
        """The first time it takes seconds, in which a rank would do nothing else. Any thread may ask for it before."""
        with self._reading:
            if self._vocabulary is None:
                self._vocabulary = grammar_vocabulary(self._model_path, self._trust_remote_code)
            return self._vocabulary

    def admit(self, slot: int, grammar: bytes, output_ids: Sequence[int]) -> None:
        """grammar: zlib of a compiled grammar's JSON, empty = none; output_ids: what was generated under it so far."""
        self._matchers.pop(slot, None)
        self.failures.pop(slot, None)
        if not grammar:
            return
        try:
            self.vocabulary()  # its time is nobody's fault
        except (CheckpointError, RuntimeError, ValueError, OSError) as error:
            self.failures[slot] = RowFailure(f"the vocabulary can't be read: {error}")
            return
        self._seconds_left[slot] = SAVED_S
        try:
            with self._timed(slot):
                self._matchers[slot] = self._matcher(grammar)
        except (RuntimeError, ValueError, zlib.error) as error:  # xgrammar's own errors are RuntimeErrors
            self._blame(slot, f"can't be read: {error}")
        for token_id in output_ids:
            self._accept(slot, token_id)

    @property
    def is_in_use(self) -> bool:
        return bool(self._matchers or self.failures)

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

        assert self._vocabulary is not None, "matchers come from the vocabulary"
        vocab_size = min(self._vocabulary.vocab_size, scores.shape[1])
        bits = xgrammar.allocate_token_bitmask(len(rows), self._vocabulary.vocab_size)  # [num_rows, words] int32
        for line, row in zip(bits, rows, strict=True):
            self._fill(line, slots[row], unwanted[row])
        places = torch.tensor(rows).to(scores.device)
        masked = scores[places]
        xgrammar.apply_token_bitmask_inplace(masked, bits.to(scores.device), vocab_size=vocab_size)
        masked[:, vocab_size:] = NEVER
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

    def _matcher(self, grammar: bytes) -> "GrammarMatcher":
        import xgrammar

        key = hashlib.sha256(grammar).digest()
        if key not in self._compiled:
            text = zlib.decompress(grammar).decode()
            self._compiled[key] = xgrammar.CompiledGrammar.deserialize_json(text, self.vocabulary()), len(text)
            self._num_compiled_bytes += len(text)
        self._compiled.move_to_end(key)
        compiled, _ = self._compiled[key]
        while len(self._compiled) > MAX_COMPILED or self._num_compiled_bytes > MAX_COMPILED_BYTES:
            self._num_compiled_bytes -= self._compiled.popitem(last=False)[1][1]
        return xgrammar.GrammarMatcher(compiled)
