"""One step as the scheduler plans it: who runs with how many tokens, and what that needs first."""

from dataclasses import dataclass, field

from loray.deployments.adapters import Adapter
from loray.deployments.sequence import Sequence
from loray.models.step import AdapterLoad, Admission, CapturedSteps, Row


@dataclass(eq=False, slots=True)
class Plan:
    """One step, and whose tokens and embeddings it makes."""

    loads: dict[Adapter, AdapterLoad] = field(default_factory=dict)
    admissions: list[Admission] = field(default_factory=list)
    rows: dict[Sequence, Row] = field(default_factory=dict)
    num_tokens: int = 0
    num_scores: int = 0  # pairs of a query and a key

    @property
    def sampled(self) -> list[Sequence]:
        """The sequences that get a token, in the order of the step's rows."""
        return [sequence for sequence, row in self.rows.items() if row.samples and not sequence.request.pooling]

    @property
    def pooled(self) -> list[Sequence]:
        """The sequences that get their embedding, in the order of the step's rows."""
        return [sequence for sequence, row in self.rows.items() if row.samples and sequence.request.pooling]

    def admit(self, sequence: Sequence) -> None:
        """It has its slot and the blocks that need not be computed."""
        assert sequence.slot is not None
        self.admissions.append(
            Admission(
                slot=sequence.slot,
                token_ids=list(sequence.token_ids),
                block_ids=sequence.block_ids[:],
                num_computed=sequence.num_computed,
                page_ids=sequence.adapter.page_ids if sequence.adapter else [],
                sampling=sequence.request.sampling,
                pooling=sequence.request.pooling,
                num_output=sequence.num_output,
                wants_prompt_logprobs=sequence.wants_prompt_logprobs,
            )
        )

    def add(self, sequence: Sequence, row: Row) -> None:
        """The sequence's next tokens, which count as computed already."""
        self.rows[sequence] = row
        self.num_tokens += row.num_tokens
        self.num_scores += _num_scores(sequence.num_computed - row.num_tokens, sequence.num_computed)

    def remove(self, sequence: Sequence) -> Row | None:
        """Before the sequence forgets what is computed. What it had in this step, if anything."""
        row = self.rows.pop(sequence, None)
        if row:
            self.num_tokens -= row.num_tokens
            self.num_scores -= _num_scores(sequence.num_computed - row.num_tokens, sequence.num_computed)
        return row

    def outgrows(self, captured: CapturedSteps, start: int, end: int) -> bool:
        """Whether one more prompt, its tokens from start to end, makes a step too large to be replayed that is not so without it. The
        first goes into a step however long it is."""
        has_prompt = self.num_tokens > len(self.rows)
        num_tokens, num_scores = self.num_tokens + end - start, self.num_scores + _num_scores(start, end)
        return has_prompt and captured.has(self.num_tokens, self.num_scores) and not captured.has(num_tokens, num_scores)


def _num_scores(start: int, end: int) -> int:
    """Each token from start to end sees itself and all before it."""
    return (end * (end + 1) - start * (start + 1)) // 2
