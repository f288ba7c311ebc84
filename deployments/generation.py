"""One request on its way: makes text of the backend's tokens and notes counts and times. Knows neither HTTP nor its shapes."""

import math
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace

from loray.deployments.backend import Backend
from loray.deployments.detokenizer import Detokenizer
from loray.deployments.errors import Incomplete
from loray.deployments.off_loop import in_turn_if
from loray.deployments.request import Alternatives, GenerationRequest, TokenEvent
from loray.deployments.stop_strings import Shelter, StopStrings
from loray.deployments.token_bytes import whole_text
from loray.deployments.tokenizer import Tokenizer

LOWEST_LOGPROB = -1e4  # stands for anything JSON can't write
OFF_LOOP_TOKENS = 256  # about 2 ms of decoding one by one; longer prompts would hold up every other stream, so a thread does them


@dataclass(frozen=True, slots=True)
class GeneratedToken:
    id: int
    text: str  # what became whole with this token; a special token's own name
    logprob: float  # finite
    is_special: bool
    alternatives: tuple["GeneratedToken", ...] = ()  # the most probable tokens at its place; none have alternatives themselves
    own: bytes = b""  # the token's, where `text` is not they: within a character, or after bytes that never became one


@dataclass(frozen=True, slots=True)
class PromptToken:
    id: int
    text: str  # as in GeneratedToken
    logprob: float | None  # finite; the first has none, for nothing comes before it
    is_special: bool
    alternatives: tuple[GeneratedToken, ...] = ()
    own: bytes = b""  # as in GeneratedToken


@dataclass(frozen=True, slots=True)
class Piece:
    """Tokens that were ready together."""

    tokens: list[GeneratedToken]
    text: str  # safe to give out: no half character, no stop string or beginning of one
    finish_reason: str = ""  # "" = goes on; "length" | "eos_token" | "stop_sequence"


@dataclass(slots=True)
class Timing:
    """Moments of one request, in seconds of the monotonic clock; 0 = not yet."""

    received: float = field(default_factory=time.monotonic)
    validated: float = 0.0
    accepted: float = 0.0  # by a driver, which may still have to fetch the adapter; 0 also where it refused the request after all
    admitted: float = 0.0  # it left the queue; known with the first token
    first_token: float = 0.0
    latest_token: float = 0.0
    finished: float = 0.0
    gaps: list[float] = field(default_factory=list)  # seconds between tokens, one for each event


def num_taken(request: GenerationRequest, timing: Timing) -> int:
    """Prompt tokens that a driver took: none of a request that it refused."""
    return len(request.prompt_ids) if timing.accepted else 0


class Generation:
    """Iterate once, over pieces; then `aclose`, which aborts the request if it is still running."""

    def __init__(
        self,
        request: GenerationRequest,
        backend: Backend,
        tokenizer: Tokenizer,
        stops: list[str],
        timing: Timing,
        shelter: Shelter | None = None,
    ) -> None:
        """`shelter`: where in the text no stop string counts."""
        self.request = request
        self.timing = timing
        self.num_tokens = 0
        self.finish_reason = ""
        self._stops = stops
        self._tokenizer = tokenizer
        self._detokenizer = Detokenizer(tokenizer, request.prompt_ids)
        self._stop_strings = StopStrings(stops, shelter)
        self._events = backend.generate(request)
        self._prompt_logprobs: list[float] = []  # of all but the first
        self._prompt_alternatives: list[Alternatives] = []

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.request.prompt_ids)

    @property
    def stop_text(self) -> str:
        """The stop string that ended it, as far as it was text; "" for none."""
        return self._stop_strings.matched

    @property
    def _may_end(self) -> bool:
        return self.num_tokens >= self.request.sampling.min_new_tokens

    async def __aiter__(self) -> AsyncIterator[Piece]:
        self.timing.validated = time.monotonic()
        async for event in self._events:
            self._note_time(event)
            if event.token_ids:
                yield self._piece(event)
            if self.finish_reason:
                return
            assert not event.finish_reason, "the last token and the finish_reason come together"
        raise Incomplete("the generation broke off")

    async def prompt_tokens(self) -> list[PromptToken]:
        """Of a request that wants prompt log-probabilities, once its first piece is there."""
        assert len(self._prompt_logprobs) == self.num_prompt_tokens - 1, "the first token's event has all prompt log-probabilities"
        return await in_turn_if(self.num_prompt_tokens > OFF_LOOP_TOKENS, self._prompt_tokens)

    async def aclose(self) -> None:
        self.timing.finished = self.timing.finished or time.monotonic()
        await self._events.aclose()

    def _note_time(self, event: TokenEvent) -> None:
        now = time.monotonic()
        self.timing.accepted = self.timing.accepted or now
        if not event.token_ids:
            return
        if self.timing.first_token:
            self.timing.gaps.append((now - self.timing.latest_token) / len(event.token_ids))
        else:
            self.timing.admitted = min(now, self.timing.accepted + event.queue_s)
            self.timing.first_token = now
        self.timing.latest_token = now

    def _piece(self, event: TokenEvent) -> Piece:
        self._note_prompt(event)
        tokens: list[GeneratedToken] = []
        text = ""
        alternatives = event.alternatives or [[]] * len(event.token_ids)
        for token_id, logprob, others in zip(event.token_ids, event.logprobs, alternatives, strict=True):
            token = _token(self._tokenizer, self._detokenizer, token_id, logprob, others)
            tokens.append(token)
            self.num_tokens += 1
            if not token.is_special:
                text += self._stop_strings.push(token.text, self._may_end)
            if self.stop_text or (token.is_special and token.text in self._stops and self._may_end):
                self.finish_reason = "stop_sequence"
                break
        else:
            self.finish_reason = "stop_sequence" if event.finish_reason == "stop_token" else event.finish_reason
        if self.finish_reason and not self.stop_text:
            left = self._detokenizer.flush()
            if not tokens[-1].is_special:
                tokens[-1] = replace(tokens[-1], text=tokens[-1].text + left)
            text += self._stop_strings.push(left, self._may_end) + self._stop_strings.flush()
        return Piece(tokens, text, self.finish_reason)

    def _note_prompt(self, event: TokenEvent) -> None:
        if event.prompt_logprobs:
            self._prompt_logprobs, self._prompt_alternatives = event.prompt_logprobs, event.prompt_alternatives

    def _prompt_tokens(self) -> list[PromptToken]:
        detokenizer = Detokenizer(self._tokenizer)
        alternatives = self._prompt_alternatives or [[]] * len(self._prompt_logprobs)
        tokens: list[PromptToken] = []
        for token_id, logprob, others in zip(self.request.prompt_ids, [0.0, *self._prompt_logprobs], [[], *alternatives], strict=True):
            token = _token(self._tokenizer, detokenizer, token_id, logprob, others)
            prompt_logprob = token.logprob if tokens else None
            tokens.append(PromptToken(token.id, token.text, prompt_logprob, token.is_special, token.alternatives, token.own))
        return tokens


def _token(tokenizer: Tokenizer, detokenizer: Detokenizer, token_id: int, logprob: float, others: Alternatives) -> GeneratedToken:
    """Takes the token; the others might have stood in its place."""
    specials = tokenizer.special_texts
    alternatives = tuple(_alternative(specials, detokenizer, *other) for other in others)
    own = detokenizer.own_bytes(token_id)
    text = specials.get(token_id) or detokenizer.push(token_id)
    return GeneratedToken(token_id, text, _finite(logprob), token_id in specials, alternatives, own)


def _alternative(specials: dict[int, str], detokenizer: Detokenizer, token_id: int, logprob: float) -> GeneratedToken:
    """Its text is its own, not that of bytes before it, to which it might not have belonged."""
    own = detokenizer.own_bytes(token_id)
    text = specials.get(token_id) or whole_text(own) or detokenizer.peek(token_id)
    return GeneratedToken(token_id, text, _finite(logprob), token_id in specials, own=own)


def _finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else LOWEST_LOGPROB
