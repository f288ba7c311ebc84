"""What of a sequence need not be computed: the blocks of its prefix that others have left, and those that it leaves to others."""

from loray.deployments.block_pool import BlockPool
from loray.deployments.sequence import Sequence


class Prefixes:
    def __init__(self, blocks: BlockPool) -> None:
        self._blocks = blocks

    def take(self, sequence: Sequence) -> list[int]:
        """The blocks that are there, which are its own from now on."""
        # At least one token is computed, to sample from; all of them for an embedding, and for the log-probabilities of a prompt.
        takes_all = sequence.request.pooling or sequence.wants_prompt_logprobs
        num_reusable = 0 if takes_all else (len(sequence.token_ids) - 1) // self._blocks.block_size
        return self._blocks.take_cached(sequence.hash_full_blocks(self._blocks.block_size)[:num_reusable])

    def num_cached(self, sequence: Sequence) -> int:
        """Tokens that need not be computed."""
        cached = self.take(sequence)
        self._blocks.release(cached)
        return len(cached) * self._blocks.block_size

    def num_wanted(self, sequence: Sequence) -> int:
        """Free blocks that its whole prompt would use up."""
        num_free = self._blocks.num_free
        cached = self.take(sequence)
        num_wanted = self._blocks.num_needed(sequence.num_tokens) - len(cached) + num_free - self._blocks.num_free
        self._blocks.release(cached)
        return num_wanted

    def publish(self, sequence: Sequence) -> None:
        """Make its full blocks findable. Their content may still be on its way, but always ahead of any step that reads it."""
        hashes = sequence.hash_full_blocks(self._blocks.block_size)
        num_full = min(sequence.num_computed // self._blocks.block_size, len(hashes))
        for i in range(sequence.num_published, num_full):
            self._blocks.publish(sequence.block_ids[i], hashes[i])
        sequence.num_published = max(sequence.num_published, num_full)
