"""One choice of an OpenAI answer as it grows: its chunks on the way, the whole of it at the end. Pure: it starts and awaits nothing."""

import itertools
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from loray.deployments.generation import GeneratedToken, Piece, PromptToken
from loray.deployments.openai_shapes import FINISH_REASONS
from loray.deployments.token_bytes import whole_text
from loray.deployments.tool_parser import CallPiece, Said, ToolCallParser

LOGPROB_LISTS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
Tokens = Sequence[GeneratedToken | PromptToken]
Placed = tuple[int, GeneratedToken | PromptToken]  # characters of the text before it, and the token


@dataclass(slots=True)
class HeldTokens:
    """Tokens whose text is not given out yet: if it is a stop string, they are no part of the answer. Special ones have no text in it."""

    has_special: bool = False  # whether they are told of
    held: list[Placed] = field(default_factory=list)
    num_chars: int = 0  # of all tokens
    num_given: int = 0  # of the answer

    def push(self, piece: Piece) -> list[Placed]:
        """Those that are part of the answer now."""
        for token in piece.tokens:
            if self.has_special or not token.is_special:
                self.held.append((self.num_chars + num_broken(token), token))
            self.num_chars += 0 if token.is_special else len(token.text)
        self.num_given += len(piece.text)
        is_whole = piece.finish_reason not in ("", "stop_sequence")
        num = len(self.held) if is_whole else sum(place < self.num_given for place, _ in self.held)
        ready, self.held = self.held[:num], self.held[num:]
        return ready


@dataclass(slots=True)
class ChatChoice:
    index: int
    has_logprobs: bool
    parser: ToolCallParser | None  # None: all it writes is content
    num_tokens: int = 0
    text: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    held: HeldTokens = field(default_factory=HeldTokens)
    finish_reason: str = ""
    is_begun: bool = False

    def add(self, piece: Piece, prompt: Tokens = ()) -> list[dict[str, Any]]:
        """The choices of the chunks that it makes; the prompt is never part of a chat's answer."""
        said = self._said(piece)
        self.num_tokens += len(piece.tokens)
        self.text += said.text
        new = [chat_logprob(token) for _, token in self.held.push(piece)] if self.has_logprobs else []
        self.logprobs += new
        logprobs = {"content": new, "refusal": None} if self.has_logprobs else None
        parts: list[tuple[dict[str, Any], Any]] = []  # delta, logprobs
        if not self.is_begun:
            self.is_begun = True
            parts.append(({"role": "assistant", "content": None if self.parser else ""}, None))
        if said.text or new:
            parts.append(({"content": said.text} if said.text else {}, logprobs))
        parts += [({"tool_calls": [self._call_delta(call)]}, None) for call in said.calls]
        shapes: list[dict[str, Any]] = [self._shape(delta, logprobs, None) for delta, logprobs in parts]
        if piece.finish_reason:
            is_called = self.calls and piece.finish_reason != "length"
            self.finish_reason = "tool_calls" if is_called else FINISH_REASONS[piece.finish_reason]
            shapes.append(self._shape({}, None, self.finish_reason))
        return shapes

    def whole(self) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": self.text, "refusal": None}
        if self.calls:
            message |= {"content": self.text or None, "tool_calls": self.calls}
        logprobs = {"content": self.logprobs, "refusal": None} if self.has_logprobs else None
        return {"index": self.index, "message": message, "logprobs": logprobs, "finish_reason": self.finish_reason}

    @property
    def num_told(self) -> int:
        """Tokens with their log-probabilities."""
        return len(self.logprobs)

    def _said(self, piece: Piece) -> Said:
        if not self.parser:
            return Said(piece.text)
        said = self.parser.push(piece.text)
        if piece.finish_reason:
            said.text += self.parser.flush(is_cut=piece.finish_reason == "length")
        return said

    def _call_delta(self, piece: CallPiece) -> dict[str, Any]:
        if piece.name:
            self.calls.append(
                {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": {"name": piece.name, "arguments": ""}}
            )
            call = self.calls[-1]
            return {"index": piece.index, **call, "function": dict(call["function"])}
        self.calls[piece.index]["function"]["arguments"] += piece.arguments
        return {"index": piece.index, "function": {"arguments": piece.arguments}}

    def _shape(self, delta: dict[str, Any], logprobs: Any, finish_reason: str | None) -> dict[str, Any]:
        return {"index": self.index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}


@dataclass(slots=True)
class CompletionChoice:
    index: int
    has_logprobs: bool
    echo: str = ""  # what stands before the text
    echo_places: Sequence[int] = ()  # in it, of the prompt's tokens; none where it was made of them
    is_echo_only: bool = False  # the one token that was generated is not wanted
    num_tokens: int = 0
    text: str = ""
    logprobs: dict[str, list[Any]] = field(default_factory=lambda: {name: [] for name in LOGPROB_LISTS})
    finish_reason: str = ""
    score: float = 0.0  # sum of the log-probabilities
    held: HeldTokens = field(default_factory=lambda: HeldTokens(has_special=True))  # who scores texts counts every token
    is_begun: bool = False

    def add(self, piece: Piece, prompt: Tokens = ()) -> list[dict[str, Any]]:
        """The choices of the chunks that it makes: none while its text is held back. The prompt comes with the first piece."""
        if self.is_echo_only:
            piece = Piece([], "", piece.finish_reason)
        text = piece.text
        self.num_tokens += len(piece.tokens)
        self.score += sum(token.logprob for token in piece.tokens)
        logprobs = self._logprobs(piece, prompt) if self.has_logprobs else None
        if not self.is_begun:
            self.is_begun = True
            text = self.echo + text
        self.text += text
        if piece.finish_reason:
            self.finish_reason = "length" if self.is_echo_only else FINISH_REASONS[piece.finish_reason]
        if not text and not self.finish_reason and not (logprobs and logprobs["tokens"]):
            return []
        return [{"index": self.index, "text": text, "logprobs": logprobs, "finish_reason": self.finish_reason or None}]

    def whole(self) -> dict[str, Any]:
        logprobs = self.logprobs if self.has_logprobs else None
        return {"index": self.index, "text": self.text, "logprobs": logprobs, "finish_reason": self.finish_reason}

    @property
    def num_told(self) -> int:
        """Tokens with their log-probabilities."""
        return len(self.logprobs["tokens"])

    @property
    def mean_logprob(self) -> float:
        return self.score / max(1, self.num_tokens)

    def _logprobs(self, piece: Piece, prompt: Tokens) -> dict[str, list[Any]]:
        """Of the tokens that are part of the answer now."""
        new: dict[str, list[Any]] = {name: [] for name in LOGPROB_LISTS}
        places = (self.echo_places or places_of(prompt)) if prompt else ()
        placed = [(len(self.echo) + place, token) for place, token in self.held.push(piece)]
        for place, token in [*zip(places, prompt, strict=True), *placed]:
            best = {token_text(other): other.logprob for other in reversed(token.alternatives)}
            new["tokens"].append(token_text(token))
            new["token_logprobs"].append(token.logprob)
            new["top_logprobs"].append(None if token.logprob is None else {**best, token_text(token): token.logprob})
            new["text_offset"].append(place)
        for name, values in new.items():
            self.logprobs[name] += values
        return new


Choice = ChatChoice | CompletionChoice


def places_of(prompt: Tokens) -> list[int]:
    """In the text that is made of them, without special ones."""
    lengths = (0 if token.is_special else len(token.text) for token in prompt)
    return [place + num_broken(token) for place, token in zip(itertools.accumulate(lengths, initial=0), prompt, strict=False)]


def num_broken(token: GeneratedToken | PromptToken) -> int:
    """Characters that its text has before its own, for bytes of earlier tokens."""
    own = whole_text(token.own)
    return max(0, len(token.text) - len(own)) if own else 0


def chat_logprob(token: GeneratedToken | PromptToken) -> dict[str, Any]:
    return {**token_shape(token), "top_logprobs": [token_shape(other) for other in token.alternatives]}


def token_shape(token: GeneratedToken | PromptToken) -> dict[str, Any]:
    """The names of a text's tokens make the text; one within a character is what became whole with it, be it nothing."""
    return {"token": whole_text(token.own) or token.text, "logprob": token.logprob, "bytes": list(token.own or token.text.encode())}


def token_text(token: GeneratedToken | PromptToken) -> str:
    """As OpenAI writes a token within a character, whose text would be none: several such may be alternatives to each other."""
    if not token.own:
        return token.text
    return whole_text(token.own) or "bytes:" + "".join(f"\\x{byte:02x}" for byte in token.own)
