"""What ingress asks of the driver and what comes back, as plain values. Knows neither text nor tensors."""

import msgspec

from loray.models.step import Pooling, Sampling


class GenerationRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One sequence to generate, or with `pooling` to embed. `output_ids` is what an earlier replica already made of it."""

    request_id: str
    prompt_ids: list[int]
    output_ids: list[int] = []
    max_new_tokens: int  # counts output_ids too; 1 for an embedding, which takes no token's place
    ignore_eos: bool = False
    sampling: Sampling
    adapter_id: str = ""  # "" = base model
    pooling: Pooling = ""

    @property
    def max_tokens(self) -> int:
        """The most tokens it can come to have."""
        return len(self.prompt_ids) + (0 if self.pooling else self.max_new_tokens)


class TokenEvent(msgspec.Struct, frozen=True, array_like=True):
    """Progress of one request. The first event has no tokens and says: accepted. The last has a finish_reason or an error."""

    request_id: str
    token_ids: list[int] = []
    logprobs: list[float] = []
    finish_reason: str = ""  # "length" | "eos_token" | "embedding"
    error: str = ""  # class name in errors.py
    message: str = ""  # its message
    embedding: list[float] = []  # the one result of a request that pools; comes with the last event

    @property
    def is_last(self) -> bool:
        return bool(self.finish_reason or self.error)
