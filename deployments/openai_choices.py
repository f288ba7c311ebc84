"""One choice of an OpenAI answer as it grows: its chunks on the way, the whole of it at the end. Pure: it starts and awaits nothing."""

import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from loray.deployments.generation import GeneratedToken, Piece, PromptToken
from loray.deployments.openai_shapes import FINISH_REASONS
from loray.deployments.tool_parser import CallPiece, Said, ToolCallParser

LOGPROB_LISTS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
Tokens = Sequence[GeneratedToken | PromptToken]


@dataclass(slots=True)
class ChatChoice:
    index: int
    has_logprobs: bool
    parser: ToolCallParser | None  # None: all it writes is content
    num_tokens: int = 0
    text: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    finish_reason: str = ""
    is_begun: bool = False

    def add(self, piece: Piece, prompt: Tokens = ()) -> list[dict[str, Any]]:
        """The choices of the chunks that it makes; the prompt is never part of a chat's answer."""
        said = self._said(piece)
        self.num_tokens += len(piece.tokens)
        self.text += said.text
        logprobs = {"content": chat_logprobs(piece.tokens), "refusal": None} if self.has_logprobs else None
        self.logprobs += logprobs["content"] if logprobs else []  # type: ignore[arg-type]
        parts: list[tuple[dict[str, Any], Any]] = []  # delta, logprobs
        if not self.is_begun:
            self.is_begun = True
            parts.append(({"role": "assistant", "content": None if self.parser else ""}, None))
        if said.text or logprobs:
            parts.append(({"content": said.text}, logprobs))
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
    is_echo_only: bool = False  # the one token that was generated is not wanted
    num_tokens: int = 0
    text: str = ""
    logprobs: dict[str, list[Any]] = field(default_factory=lambda: {name: [] for name in LOGPROB_LISTS})
    finish_reason: str = ""
    score: float = 0.0  # sum of the log-probabilities
    offset: int = 0  # characters of all tokens so far
    is_begun: bool = False

    def add(self, piece: Piece, prompt: Tokens = ()) -> list[dict[str, Any]]:
        """The choices of the chunks that it makes: none while its text is held back. The prompt comes with the first piece."""
        text, tokens = (piece.text, piece.tokens) if not self.is_echo_only else ("", [])
        self.num_tokens += len(tokens)
        self.score += sum(token.logprob for token in tokens)
        logprobs = self._logprobs([*prompt, *tokens]) if self.has_logprobs else None
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
    def mean_logprob(self) -> float:
        return self.score / max(1, self.num_tokens)

    def _logprobs(self, tokens: Tokens) -> dict[str, list[Any]]:
        """Of these tokens; a special one has no text that could be told."""
        new: dict[str, list[Any]] = {name: [] for name in LOGPROB_LISTS}
        for token in tokens:
            if token.is_special and not isinstance(token, PromptToken):
                continue
            text = "" if token.is_special else token.text
            best = {other.text: other.logprob for other in reversed(token.alternatives)}
            new["tokens"].append(token.text)
            new["token_logprobs"].append(token.logprob)
            new["top_logprobs"].append(None if token.logprob is None else {**best, token.text: token.logprob})
            new["text_offset"].append(self.offset)
            self.offset += len(text)
        for name, values in new.items():
            self.logprobs[name] += values
        return new


Choice = ChatChoice | CompletionChoice


def chat_logprobs(tokens: list[GeneratedToken]) -> list[dict[str, Any]]:
    """Without special tokens, which are no part of the text."""
    return [
        {**token_shape(token), "top_logprobs": [token_shape(other) for other in token.alternatives]}
        for token in tokens
        if not token.is_special
    ]


def token_shape(token: GeneratedToken) -> dict[str, Any]:
    return {"token": token.text, "logprob": token.logprob, "bytes": list(token.text.encode())}
