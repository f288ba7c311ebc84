"""One request on its way: makes text of the backend's tokens and notes counts and times. Knows neither HTTP nor its shapes."""

import math
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from loray.deployments.backend import Backend
from loray.deployments.detokenizer import Detokenizer
from loray.deployments.errors import Incomplete
from loray.deployments.request import GenerationRequest, TokenEvent
from loray.deployments.stop_strings import StopStrings
from loray.deployments.tokenizer import Tokenizer

LOWEST_LOGPROB = -1e4  # stands for anything JSON can't write


@dataclass(frozen=True, slots=True)
class GeneratedToken:
    id: int
    text: str  # what became whole with this token; a special token's own name
    logprob: float  # finite
    is_special: bool
    alternatives: tuple["GeneratedToken", ...] = ()  # the most probable tokens at its place; none have alternatives themselves


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
    accepted: float = 0.0
    first_token: float = 0.0
    latest_token: float = 0.0
    finished: float = 0.0
    gaps: list[float] = field(default_factory=list)  # seconds between tokens, one for each event


class Generation:
    """Iterate once, over pieces; then `aclose`, which aborts the request if it is still running."""

    def __init__(self, request: GenerationRequest, backend: Backend, tokenizer: Tokenizer, stops: list[str], timing: Timing) -> None:
        self.request = request
        self.timing = timing
        self.num_tokens = 0
        self.finish_reason = ""
        self._stops = stops
        self._specials = tokenizer.special_texts
        self._detokenizer = Detokenizer(tokenizer, request.prompt_ids)
        self._stop_strings = StopStrings(stops)
        self._events = backend.generate(request)

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.request.prompt_ids)

    @property
    def stop_text(self) -> str:
        """The stop string that ended it, as far as it was text; "" for none."""
        return self._stop_strings.matched

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
            self.timing.first_token = now
        self.timing.latest_token = now

    def _piece(self, event: TokenEvent) -> Piece:
        tokens: list[GeneratedToken] = []
        text = ""
        for token_id, logprob in zip(event.token_ids, event.logprobs, strict=True):
            token = self._token(token_id, logprob)
            tokens.append(token)
            if not token.is_special:
                text += self._stop_strings.push(token.text)
            if self.stop_text or (token.is_special and token.text in self._stops):
                self.finish_reason = "stop_sequence"
                break
        else:
            self.finish_reason = event.finish_reason
        self.num_tokens += len(tokens)
        if self.finish_reason:
            text += self._rest()
        return Piece(tokens, text, self.finish_reason)

    def _token(self, token_id: int, logprob: float) -> GeneratedToken:
        finite = logprob if math.isfinite(logprob) else LOWEST_LOGPROB
        special = self._specials.get(token_id)
        if special is not None:
            return GeneratedToken(token_id, special, finite, True)
        return GeneratedToken(token_id, self._detokenizer.push(token_id), finite, False)

    def _rest(self) -> str:
        if self.stop_text:
            return ""
        text = self._stop_strings.push(self._detokenizer.flush())
        return text + self._stop_strings.flush()
