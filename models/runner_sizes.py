"""What a runner is told beside its model: how much it makes room for, and how it keeps numbers."""

from dataclasses import dataclass

MANY_KEYS = 32_768  # 128 MiB of one layer of Llama-3.1-8B in bfloat16


@dataclass(frozen=True, slots=True)
class RunnerSizes:
    max_running: int
    max_total_tokens: int  # of a sequence
    block_size: int = 16
    max_batch_tokens: int = 2048  # of a step

    @property
    def most_copied_keys(self) -> int:
        """Of a step's prompts, out of their blocks: the faster way to attend, as long as the copies are no burden. Those that many share
        would be copied for each; more are read where they lie. The end of one long prompt and the begin of the next are always few."""
        return max(self.max_total_tokens + self.max_batch_tokens, MANY_KEYS)


@dataclass(frozen=True, slots=True)
class RunnerOptions:
    trust_remote_code: bool = False  # whether code that comes with a checkpoint may run
    has_float8_cache: bool = False
    has_float8_weights: bool = False
