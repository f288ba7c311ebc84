"""What a rank is told to do in one step, and what it answers: plain values, no tensors, no torch.

The driver keeps ids; each rank keeps, for every slot, the tokens, the block table and the number of computed tokens. So a
decode costs a few bytes on the wire, and a sampled token feeds the next step without leaving the device.
"""

import hashlib
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

MAX_TOP_K = 2**31 - 1
Pooling = Literal["", "mean", "last"]  # of the final hidden states into an embedding; "" = none, the sequence generates tokens


class Sampling(msgspec.Struct, frozen=True, array_like=True):
    """How one sequence picks its tokens."""

    temperature: Annotated[float, Meta(ge=0)] = 0.0  # 0 = greedy
    top_k: Annotated[int, Meta(ge=0, le=MAX_TOP_K)] = 0  # 0 = off
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0  # 1 = off
    seed: Annotated[int, Meta(ge=0)] = 0  # up to 2**63-1, which is all that the wire's integers hold
    typical_p: Annotated[float, Meta(gt=0, le=1)] = 1.0  # 1 = off
    repetition_penalty: Annotated[float, Meta(gt=0)] = 1.0  # over prompt and output
    frequency_penalty: float = 0.0  # for each time a token is in the output
    presence_penalty: float = 0.0  # for a token that is in the output
    logit_bias: dict[int, float] = {}  # token id -> added to its logit
    watermark: bool = False
    min_new_tokens: Annotated[int, Meta(ge=0)] = 0  # before so many none of stop_ids
    stop_ids: list[int] = []  # tokens that end the sequence; the driver fills them in where min_new_tokens needs them
    grammar: bytes = b""  # an xgrammar grammar, not compiled: zlib of its JSON; empty = none
    num_alternatives: Annotated[int, Meta(ge=0)] = 0  # most probable tokens to report beside each new one
    num_prompt_alternatives: Annotated[int, Meta(ge=0)] = 0  # the same of the prompt's, where its log-probabilities are wanted


Alternatives = list[tuple[int, float]]  # token ids and their log-probabilities, most probable first


class Admission(msgspec.Struct, frozen=True, array_like=True):
    """A sequence takes a slot. Whatever the slot held before is forgotten."""

    slot: int
    token_ids: list[int]  # prompt and everything generated so far
    block_ids: list[int]  # blocks already filled for it (a cached prefix)
    num_computed: int  # tokens in those blocks
    page_ids: list[int]  # rank pages of its adapter, empty = base model
    sampling: Sampling
    pooling: Pooling = ""
    num_output: int = 0  # of token_ids, at their end, that were generated; the prompt is what comes before
    wants_prompt_logprobs: bool = False  # with num_computed 0 only


class Row(msgspec.Struct, frozen=True, array_like=True):
    """One sequence's share of a step: its next num_tokens tokens."""

    slot: int
    num_tokens: int
    new_block_ids: list[int]  # appended to the slot's block table before the step
    samples: bool  # whether the last of these tokens yields a new one, or ends an embedding


class AdapterLoad(msgspec.Struct, frozen=True, array_like=True):
    """Fill these rank pages from this PEFT folder."""

    path: str
    page_ids: list[int]
    signature: str = ""  # of the files as they were validated; a rank that finds others refuses the load


class HostCopy(msgspec.Struct, frozen=True, array_like=True):
    """A rank's part of one version of an adapter, kept in host memory."""

    path: str
    signature: str


class Step(msgspec.Struct, frozen=True, array_like=True):
    """Applied in this order: freed pages, loads, admissions, rows, drops; what is to be prepared is read meanwhile, beside the steps."""

    step_id: int
    loads: list[AdapterLoad]
    admissions: list[Admission]
    rows: list[Row]
    prepares: list[HostCopy] = []
    drops: list[HostCopy] = []
    freed_pages: list[int] = []  # no adapter is in them any more; a load of the same step may fill them again
    grammars: list[bytes] = []  # as in Sampling; to be compiled beside the steps, and kept
    dropped_grammars: list[bytes] = []  # their keys


def grammar_key(grammar: bytes) -> bytes:
    return hashlib.sha256(grammar).digest()


class RowFailure(msgspec.Struct, frozen=True, array_like=True):
    """Why a sequence cannot go on."""

    reason: str
    is_callers: bool = False  # what the caller asked for leads nowhere, here and anywhere else


class StepResult(msgspec.Struct, frozen=True, array_like=True):
    """The new tokens of a step, one for each row that samples and generates, in the order of its rows; embeddings likewise."""

    step_id: int
    token_ids: list[int]
    logprobs: list[float]  # log-probability under the model's own, unwarped distribution
    failed_loads: dict[int, str] = {}  # index in the step's loads -> reason; rows that use those pages are worthless
    embeddings: list[list[float]] = []  # one for each row that samples and pools, in the order of the rows
    load_seconds: float = 0.0  # that the step's loads took
    failed_rows: dict[int, RowFailure] = {}  # by index in the step's rows; what such a row yields is worthless
    alternatives: dict[int, Alternatives] = {}  # index in token_ids -> the most probable tokens at its place, where they are wanted
    prompt_logprobs: dict[int, list[float]] = {}  # index in token_ids -> of each prompt token but the first, with the first token
    prompt_alternatives: dict[int, list[Alternatives]] = {}  # likewise


class CapturedSteps(msgspec.Struct, frozen=True):
    """Steps with prompts up to this size are replayed; a larger one is launched kernel by kernel, which takes several times as long."""

    max_tokens: int
    max_scores: int  # pairs of a query and a key

    def has(self, num_tokens: int, num_scores: int) -> bool:
        return num_tokens <= self.max_tokens and num_scores <= self.max_scores


class LoadReport(msgspec.Struct, frozen=True):
    """What a rank knows once its weights are in memory; the driver sizes the pools from it."""

    device: str
    dtype: str
    attention: str  # name of the attention backend
    weight_bytes: int  # that they take, in whatever form they are kept
    load_seconds: float
    block_bytes: int  # one KV block, all layers, this rank's heads
    page_bytes: int  # one rank page, all targets, this rank's shards
    free_bytes: int  # left on the GPU; 0 on a CPU
    has_blocks: bool  # keys and values lie in blocks, so a cached prefix can be used again
    lora_shapes: dict[str, tuple[int, int]]  # module path -> (in_features, out_features) of the whole, unsharded layer
    captured: CapturedSteps | None = None  # None = all steps are launched alike
