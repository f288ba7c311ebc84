"""OpenAI's response shapes, whole and in chunks, around finished choices or vectors. Pure: it starts and awaits nothing."""

import base64
import struct
import time
import uuid
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

FINISH_REASONS = {"length": "length", "eos_token": "stop", "stop_sequence": "stop"}
Kind = Literal["chat", "completion"]
ID_PREFIXES = {"chat": "chatcmpl", "completion": "cmpl"}
OBJECTS = {"chat": "chat.completion", "completion": "text_completion"}
CHUNK_OBJECTS = {"chat": "chat.completion.chunk", "completion": "text_completion"}


@dataclass(slots=True)
class Usage:
    num_prompt_tokens: int
    num_tokens: int = 0

    def shape(self) -> dict[str, int]:
        total = self.num_prompt_tokens + self.num_tokens
        return {"prompt_tokens": self.num_prompt_tokens, "completion_tokens": self.num_tokens, "total_tokens": total}


class ResponseShape:
    """One response's id, time and model, which all its chunks repeat."""

    def __init__(self, kind: Kind, model: str, fingerprint: str) -> None:
        head = {"id": f"{ID_PREFIXES[kind]}-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}
        self._whole_head = {**head, "system_fingerprint": fingerprint, "object": OBJECTS[kind]}
        self._chunk_head = {**self._whole_head, "object": CHUNK_OBJECTS[kind]}

    def whole(self, choices: list[dict[str, Any]], usage: Usage) -> dict[str, Any]:
        return {**self._whole_head, "choices": choices, "usage": usage.shape()}

    def chunk(self, choices: list[dict[str, Any]], **usage: dict[str, int] | None) -> dict[str, Any]:
        """`usage` is a key of the chunk only when it is given, be it None."""
        return {**self._chunk_head, "choices": choices, **usage}


def embeddings_shape(model: str, embeddings: list[list[float]], is_base64: bool, num_tokens: int) -> dict[str, Any]:
    data = [
        {"object": "embedding", "index": index, "embedding": packed(embedding) if is_base64 else written(embedding)}
        for index, embedding in enumerate(embeddings)
    ]
    return {"object": "list", "data": data, "model": model, "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens}}


def written(embedding: list[float]) -> msgspec.Raw:
    """As JSON: many at once would hold the GIL for long."""
    return msgspec.Raw(msgspec.json.encode(embedding))


def packed(embedding: list[float]) -> str:
    """base64 of little-endian float32, as OpenAI's client unpacks it."""
    return base64.b64encode(struct.pack(f"<{len(embedding)}f", *embedding)).decode()
