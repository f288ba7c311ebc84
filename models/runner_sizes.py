"""What a runner is told beside its model: how much it makes room for, and how it keeps numbers."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RunnerSizes:
    max_running: int
    max_total_tokens: int  # of a sequence
    block_size: int = 16
    max_batch_tokens: int = 2048  # of a step

    @property
    def most_copied_keys(self) -> int:
        """Of a step's prompts, out of their blocks. Those that many share would be copied for each; more are read where they lie."""
        return max(self.max_total_tokens, self.max_batch_tokens)


@dataclass(frozen=True, slots=True)
class RunnerOptions:
    trust_remote_code: bool = False  # whether code that comes with a checkpoint may run
    has_float8_cache: bool = False
    has_float8_weights: bool = False
