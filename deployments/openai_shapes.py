"""OpenAI's response shapes, whole and in chunks, made of finished pieces of text or vectors. Pure: it starts and awaits nothing."""

import base64
import struct
import time
import uuid
from typing import Any

from loray.deployments.generation import GeneratedToken

FINISH_REASONS = {"length": "length", "eos_token": "stop", "stop_sequence": "stop"}


def usage_shape(num_prompt_tokens: int, num_tokens: int) -> dict[str, int]:
    return {"prompt_tokens": num_prompt_tokens, "completion_tokens": num_tokens, "total_tokens": num_prompt_tokens + num_tokens}


def embeddings_shape(model: str, embeddings: list[list[float]], is_base64: bool, num_tokens: int) -> dict[str, Any]:
    data = [
        {"object": "embedding", "index": index, "embedding": packed(embedding) if is_base64 else embedding}
        for index, embedding in enumerate(embeddings)
    ]
    return {"object": "list", "data": data, "model": model, "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens}}


def packed(embedding: list[float]) -> str:
    """base64 of little-endian float32, as OpenAI's client unpacks it."""
    return base64.b64encode(struct.pack(f"<{len(embedding)}f", *embedding)).decode()


class CompletionShape:
    """One response's id, time and model, which all its chunks repeat."""

    id_prefix = "cmpl"
    whole_object = "text_completion"
    chunk_object = "text_completion"

    def __init__(self, model: str, includes_usage: bool) -> None:
        self._head = {"id": f"{self.id_prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}
        self._chunk_tail: dict[str, Any] = {"usage": None} if includes_usage else {}

    def whole(self, choices: list[dict[str, Any]], usage: dict[str, int]) -> dict[str, Any]:
        return {**self._head, "object": self.whole_object, "choices": choices, "usage": usage}

    def usage_chunk(self, usage: dict[str, int]) -> dict[str, Any]:
        return {**self._head, "object": self.chunk_object, "choices": [], "usage": usage}

    def choice(self, index: int, text: str, tokens: list[GeneratedToken], finish_reason: str) -> dict[str, Any]:
        return {"index": index, "text": text, "logprobs": None, "finish_reason": FINISH_REASONS[finish_reason]}

    def chunks(self, index: int, text: str, tokens: list[GeneratedToken], finish_reason: str) -> list[dict[str, Any]]:
        """Of one piece; none when its text is still held back."""
        if not text and not finish_reason:
            return []
        return [self._chunk({"index": index, "text": text, "logprobs": None, "finish_reason": FINISH_REASONS.get(finish_reason)})]

    def _chunk(self, choice: dict[str, Any]) -> dict[str, Any]:
        return {**self._head, "object": self.chunk_object, "choices": [choice], **self._chunk_tail}


class ChatShape(CompletionShape):
    id_prefix = "chatcmpl"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(self, model: str, includes_usage: bool, has_logprobs: bool) -> None:
        super().__init__(model, includes_usage)
        self._has_logprobs = has_logprobs
        self._is_first = True

    def choice(self, index: int, text: str, tokens: list[GeneratedToken], finish_reason: str) -> dict[str, Any]:
        message = {"role": "assistant", "content": text, "refusal": None}
        return {"index": index, "message": message, "logprobs": self._logprobs(tokens), "finish_reason": FINISH_REASONS[finish_reason]}

    def chunks(self, index: int, text: str, tokens: list[GeneratedToken], finish_reason: str) -> list[dict[str, Any]]:
        choices: list[dict[str, Any]] = []
        if self._is_first:
            self._is_first = False
            choices.append({"delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None})
        if text or self._has_logprobs:
            choices.append({"delta": {"content": text}, "logprobs": self._logprobs(tokens), "finish_reason": None})
        if finish_reason:
            choices.append({"delta": {}, "logprobs": None, "finish_reason": FINISH_REASONS[finish_reason]})
        return [self._chunk({"index": index, **choice}) for choice in choices]

    def _logprobs(self, tokens: list[GeneratedToken]) -> dict[str, Any] | None:
        if not self._has_logprobs:
            return None
        content = [
            {"token": token.text, "logprob": token.logprob, "bytes": list(token.text.encode()), "top_logprobs": []}
            for token in tokens
            if not token.is_special
        ]
        return {"content": content, "refusal": None}
