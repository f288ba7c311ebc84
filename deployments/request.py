"""What ingress asks of the driver and what comes back, as plain values. Knows neither text nor tensors."""

from collections.abc import Collection
from hashlib import blake2b
from typing import Literal

import msgspec

from loray.deployments.trace_context import TraceContext
from loray.models.step import Alternatives, Pooling, Sampling

SOURCES = ("local", "hub", "s3", "gs", "az", "https")  # where adapters may come from
MergeStrategy = Literal["linear", "ties", "dare_linear", "dare_ties"]
MajoritySign = Literal["total", "frequency"]


MERGE_OF = "merge of "  # and the names of its parts: what a merge is called


class MergeRecipe(msgspec.Struct, frozen=True, kw_only=True):
    """Several adapters as one: what is added, how much of each, and how."""

    adapter_ids: tuple[str, ...]
    weights: tuple[float, ...]  # one for each id
    strategy: MergeStrategy = "linear"
    density: float = 1.0  # share of the values that ties and dare keep
    majority_sign: MajoritySign = "total"


class AdapterRef(msgspec.Struct, frozen=True, kw_only=True):
    """Which adapter a request wants, before anybody has looked for it."""

    adapter_id: str  # a name, a folder, "org/name", a URL; of a merge: what to call it
    source: str = ""  # "" = as the id's scheme says, else the server's default
    revision: str = ""  # branch, tag or commit, where the source has them
    api_token: str = ""  # for adapters that not everybody may read
    merge: MergeRecipe | None = None  # its ids have this reference's source and token

    def __repr__(self) -> str:
        """Without the token: it may end up in a log."""
        return f"AdapterRef({self.adapter_id!r}, source={self.source!r}, revision={self.revision!r})"


class TemplateMark(msgspec.Struct, frozen=True):
    """The chat template that an adapter brings, if any, without its text."""

    version: str
    digest: str


class AdapterTemplate(msgspec.Struct, frozen=True):
    """The chat template that an adapter brings."""

    text: str  # "" = none
    version: str  # another one may be of the same text

    @property
    def mark(self) -> TemplateMark:
        return TemplateMark(self.version, blake2b(self.text.encode(errors="surrogatepass"), digest_size=8).hexdigest())


class GenerationRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One sequence to generate, or with `pooling` to embed. `output_ids` is what an earlier replica already made of it."""

    request_id: str
    prompt_ids: list[int]
    output_ids: list[int] = []
    max_new_tokens: int  # counts output_ids too; 1 for an embedding, which takes no token's place
    ignore_eos: bool = False
    sampling: Sampling
    adapter: AdapterRef | None = None  # None = base model
    adapter_version: str = ""  # that output_ids are of
    template: TemplateMark | None = None  # what the prompt of an adapter's chat was written with
    pooling: Pooling = ""
    stop_token_ids: list[int] = []  # tokens that end it, beside EOS
    wants_prompt_logprobs: bool = False
    began_ms: int = 0  # since 1970, where its client asked, at however many replicas it has been since; 0 = now
    deadline_s: float = 0.0  # what is left of its time when it is sent; 0 = no limit
    grammar_field: str = ""  # what the caller calls the field that asks for sampling.grammar
    trace: TraceContext = TraceContext()  # the span that it belongs under
    may_rest: bool = False  # its tokens are only written on: several at once, a moment late, do as well

    @property
    def adapter_id(self) -> str:
        """Empty for the base model."""
        return self.adapter.adapter_id if self.adapter else ""

    @property
    def max_tokens(self) -> int:
        """The most tokens it can come to have."""
        return len(self.prompt_ids) + (0 if self.pooling else self.max_new_tokens)

    def resting(self, may_rest: bool) -> "GenerationRequest":
        return msgspec.structs.replace(self, may_rest=may_rest)

    def with_stop_ids(self, eos_ids: Collection[int]) -> "GenerationRequest":
        """The ranks must know the tokens that may not come yet."""
        if not self.sampling.min_new_tokens:
            return self
        sampling = msgspec.structs.replace(self.sampling, stop_ids=sorted({*eos_ids, *self.stop_token_ids}))
        return msgspec.structs.replace(self, sampling=sampling)


class TokenEvent(msgspec.Struct, frozen=True, array_like=True):
    """Progress of one request. The first event has no tokens and says: accepted. The last has a finish_reason or an error."""

    request_id: str
    token_ids: list[int] = []
    logprobs: list[float] = []
    finish_reason: str = ""  # "length" | "eos_token" | "stop_token" | "embedding"
    error: str = ""  # class name in errors.py
    message: str = ""  # its message
    embedding: list[float] = []  # the one result of a request that pools; comes with the last event
    alternatives: list[Alternatives] = []  # of each of token_ids, most probable first; empty when none are wanted
    prompt_logprobs: list[float] = []  # of each prompt token but the first; comes with the first token when wanted
    prompt_alternatives: list[Alternatives] = []  # likewise
    queue_s: float = 0.0  # with the first token: how long it waited for a slot
    version: str = ""  # of the adapter, with the first event
    num_before: int = -1  # tokens of the request's output before these; -1 = not told

    @property
    def is_last(self) -> bool:
        return bool(self.finish_reason or self.error)

    def joined(self, later: "TokenEvent") -> "TokenEvent":
        """Both as one. `later` has the tokens that come next."""
        assert not self.is_last, "nothing comes after the last event"
        return msgspec.structs.replace(
            self,
            token_ids=self.token_ids + later.token_ids,
            logprobs=self.logprobs + later.logprobs,
            alternatives=self.alternatives + later.alternatives,
            finish_reason=later.finish_reason,
        )
