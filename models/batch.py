"""What one forward pass gets, and the words for its dimensions. Holds tensors; decides nothing.

num_tokens     tokens computed in this step, all sequences together
num_seqs       sequences of this step (or of one attention group)
num_samples    sequences whose next token is wanted
num_heads      query heads of this rank; num_kv_heads likewise
q_len          queries of a sequence in this step, padded to the longest of its attention group
context_len    keys that a sequence may see, itself included, padded to the longest of its attention group
pool_ranks     LoRA ranks that the pool of rank pages holds: 8 for each page
"""

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from loray.kernels.attention import PromptWork
from loray.kernels.lora import LoraWork
from loray.models.special import SpecialRows


class Mask(NamedTuple):
    """Which keys a query sees. No tensor: plainly causal, or every one."""

    added: Tensor | None  # [num_seqs, 1, q_len, context_len] added to the scores
    is_causal: bool  # every sequence starts here: q_len == context_len, and each query sees the keys up to itself


@dataclass(frozen=True, slots=True)
class AttentionGroup:
    """Sequences of similar size, attended in one padded call."""

    num_seqs: int
    q_len: int
    context_len: int
    tokens: slice | Tensor  # [tokens of the group] their places in the batch
    padding: Tensor | None  # [num_seqs * q_len] for each padded query a place in the batch; None = tokens, unpadded
    unpadding: Tensor | None  # [tokens of the group] for each token its place among the padded queries
    blocks: slice | Tensor  # [num_seqs, blocks of the longest] ids of KV blocks; a slice where one sequence's are consecutive
    masks: dict[int, Mask]  # by the width of a layer's sliding window, 0 = none


@dataclass(frozen=True, slots=True)
class PagedWork:
    """Sequences attended where their blocks lie, those with one token first."""

    num_decodes: int  # sequences with one token, each
    block_table: Tensor  # [num_seqs, max_blocks] int32
    context_lens: Tensor  # [num_seqs] int32; 0 = no sequence at all
    prompts: PromptWork | tuple[AttentionGroup, ...] | None  # of the other sequences; in groups on a CPU
    may_copy: bool = False  # whether there is room for the prompts' keys and values one after another


AttentionWork = tuple[AttentionGroup, ...] | PagedWork  # of one step: paged on a GPU, and decodes on a CPU where native.c can


@dataclass(frozen=True, slots=True)
class Batch:
    input_ids: Tensor  # [num_tokens] int32
    positions: Tensor  # [num_tokens] int64
    kv_slots: Tensor  # [num_tokens] int64, where each token's key and value go: block id * block size + offset; -1 = nowhere
    attention: AttentionWork
    lora_work: LoraWork  # for the tokens that have an adapter
    specials: tuple[SpecialRows, ...]  # of the tokens whose adapter has more than rank pages
    sample_tokens: Tensor | None  # [num_samples] int64, places in the batch; None = every token, in order
