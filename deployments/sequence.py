"""One request on its way through the scheduler: its tokens, blocks and slot. Never touches tensors or Ray."""

import math
import time
from collections.abc import Collection
from dataclasses import dataclass

from loray.cluster.channel import Address
from loray.deployments.adapters import Adapter
from loray.deployments.block_pool import BlockHash, chain_hash
from loray.deployments.request import GenerationRequest


@dataclass(frozen=True, slots=True)
class Ending:
    """What became of one request at this replica."""

    error: str = ""  # class name in errors.py, or "aborted"; "" = all went well
    finish_reason: str = ""
    queue_s: float = 0.0
    first_token_at: float = 0.0  # seconds of the monotonic clock; 0 = no token came
    num_tokens: int = 0  # made here
    reason: str = ""  # the error's message

    @property
    def outcome(self) -> str:
        return self.error or self.finish_reason


class Sequence:
    """`num_computed` and `num_unknown` speak of steps already sent to the ranks, whether or not their results are back."""

    def __init__(self, request: GenerationRequest, adapter: Adapter | None, reply: Address, arrival: int) -> None:
        self.request = request
        self.adapter = adapter
        self.reply = reply
        self.arrival = arrival  # lower = older
        self.accepted_at = time.monotonic()
        self.deadline = self.accepted_at + request.deadline_s if request.deadline_s > 0 else math.inf
        self.queue_s = 0.0  # seconds until it first got a slot; 0 = not yet
        self.first_token_at = 0.0  # 0 = not yet
        self.token_ids = request.prompt_ids + request.output_ids
        self.num_prompt = len(request.prompt_ids)
        self.waits_for_grammar = False  # until the ranks have compiled it
        self.num_unknown = 0  # tokens sampled, or embeddings made, by steps whose results are not back
        self.num_computed = 0  # tokens whose keys and values are in its blocks
        self.num_owed = 0  # tokens that its start has cost, less those sampled since
        self.block_ids: list[int] = []
        self.block_hashes: list[BlockHash] = []  # of the full blocks of token_ids
        self.num_published = 0
        self.slot: int | None = None  # held while running
        self.finish_reason = ""
        self.is_finished = False

    @property
    def num_tokens(self) -> int:
        """Known tokens and those on their way."""
        return len(self.token_ids) + self.num_unknown

    @property
    def num_output(self) -> int:
        return len(self.token_ids) - self.num_prompt

    @property
    def wants_prompt_logprobs(self) -> bool:
        """They come with the first token, so whoever has one has them."""
        return self.request.wants_prompt_logprobs and self.num_output == 0

    @property
    def num_to_compute(self) -> int:
        """0 once the last token it may have, or its embedding, is on its way."""
        if self.num_tokens - self.num_prompt >= self.request.max_new_tokens:
            return 0
        return self.num_tokens - self.num_computed

    def hash_full_blocks(self, block_size: int) -> list[BlockHash]:
        for start in range(len(self.block_hashes) * block_size, len(self.token_ids) - block_size + 1, block_size):
            previous = self.block_hashes[-1] if self.block_hashes else self._hash_root
            self.block_hashes.append(chain_hash(previous, self.token_ids[start : start + block_size]))
        return self.block_hashes

    @property
    def _hash_root(self) -> BlockHash:
        return self.adapter.version.encode() if self.adapter else b""

    def append(self, token_id: int, eos_ids: Collection[int]) -> None:
        """A token came back."""
        self.first_token_at = self.first_token_at or time.monotonic()
        self.token_ids.append(token_id)
        is_ending = not self.request.ignore_eos or bool(self.request.sampling.grammar)  # of a text that is whole nothing more can come
        if token_id in eos_ids and is_ending:
            self.finish_reason = "eos_token"
        elif token_id in self.request.stop_token_ids:
            self.finish_reason = "stop_token"
        elif self.num_output >= self.request.max_new_tokens:
            self.finish_reason = "length"

    def ending(self, error: str, reason: str = "") -> Ending:
        num_tokens = self.num_output - len(self.request.output_ids)
        return Ending(error, self.finish_reason, self.queue_s, self.first_token_at, num_tokens, reason)
