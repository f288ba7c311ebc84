"""A rank in plain Python that follows the step protocol to the letter and notices when the driver does not.

Its blocks hold (adapter, token) where a real rank holds keys and values, so a wrong block table, a block shared by mistake or a
stale page shows as a wrong context. The "model" is a hash of the context; an embedding is made of what each row computed, and a token's
log-probability is the token itself, negative. No grammar can be followed.
"""

import zlib

from loray.models.step import Admission, RowFailure, Step, StepResult

VOCAB = 50
GRAMMAR_FAILURES = {b"a dead end": RowFailure("a dead end", is_callers=True), b"no vocabulary": RowFailure("no vocabulary")}


def next_token(adapter: str, context: list[int]) -> int:
    return zlib.crc32(f"{adapter}:{context}".encode()) % VOCAB


def greedy(adapter: str, prompt: list[int], max_new_tokens: int, eos_id: int | None = None) -> list[int]:
    """The oracle: one request, alone."""
    output: list[int] = []
    while len(output) < max_new_tokens and (not output or output[-1] != eos_id):
        output.append(next_token(adapter, prompt + output))
    return output


def embedding(adapter: str, prompt: list[int]) -> list[float]:
    """The oracle: one text, alone. The mean of what each of its tokens adds."""
    return [sum(token + len(adapter) for token in prompt) / len(prompt), float(next_token(adapter, prompt))]


class SimulatedRank:
    def __init__(self, num_blocks: int, block_size: int, num_pages: int = 0) -> None:
        self.block_size = block_size
        self.blocks: list[list[tuple[str, int] | None]] = [[None] * block_size for _ in range(num_blocks)]
        self.pages = [""] * num_pages
        self.slots: dict[int, Admission] = {}
        self.tokens: dict[int, list[int]] = {}
        self.tables: dict[int, list[int]] = {}
        self.computed: dict[int, int] = {}
        self.sums: dict[int, int] = {}  # of the sequences that pool
        self.embeddings: list[list[float]] = []  # of the step that runs
        self.prompt_logprobs: dict[int, list[float]] = {}  # by slot, as far as they are computed
        self.bad_paths: set[str] = set()
        self.overflowing: set[str] = set()  # adapters with which log-probabilities are NaN and embeddings end in inf; "" = the base model
        self.steps: list[Step] = []

    def execute(self, step: Step) -> StepResult:
        self.steps.append(step)
        failed = {i: "unreadable" for i, load in enumerate(step.loads) if load.path in self.bad_paths}
        for load in step.loads:
            for page_id in load.page_ids:
                self.pages[page_id] = load.path
        for admission in step.admissions:
            self.slots[admission.slot] = admission
            self.tokens[admission.slot] = list(admission.token_ids)
            self.tables[admission.slot] = list(admission.block_ids)
            self.computed[admission.slot] = admission.num_computed
            self.sums[admission.slot] = 0
            self.prompt_logprobs.pop(admission.slot, None)
            if admission.wants_prompt_logprobs:
                assert admission.num_computed == admission.num_output == 0, "they come of the whole prompt, with the first token"
                self.prompt_logprobs[admission.slot] = []
        self.embeddings = []
        sampled = [
            (row.slot, token)
            for row in step.rows
            if (token := self._run(row.slot, row.num_tokens, row.new_block_ids, row.samples)) is not None
        ]
        counts = [self.slots[slot].sampling.num_alternatives for slot, _ in sampled]
        prompt_counts = [self.slots[slot].sampling.num_prompt_alternatives for slot, _ in sampled]
        prompts = {i: self.prompt_logprobs.pop(slot) for i, (slot, _) in enumerate(sampled) if slot in self.prompt_logprobs}
        return StepResult(
            step.step_id,
            [token for _, token in sampled],
            [float("nan") if self._adapter(slot) in self.overflowing else -float(token) for slot, token in sampled],
            failed,
            self.embeddings,
            failed_rows={i: GRAMMAR_FAILURES[text] for i, row in enumerate(step.rows) if (text := self.slots[row.slot].sampling.grammar)},
            alternatives={i: [(token, -float(token))] * counts[i] for i, (_, token) in enumerate(sampled) if counts[i]},
            prompt_logprobs=prompts,
            prompt_alternatives={
                i: [[(0, value)] * prompt_counts[i] for value in values] for i, values in prompts.items() if prompt_counts[i]
            },
        )

    def _run(self, slot: int, num_tokens: int, new_block_ids: list[int], samples: bool) -> int | None:
        table, tokens, start = self.tables[slot], self.tokens[slot], self.computed[slot]
        table += new_block_ids
        adapter = self._adapter(slot)
        for position in range(start, start + num_tokens):
            self.blocks[table[position // self.block_size]][position % self.block_size] = (adapter, tokens[position])
            self.sums[slot] += tokens[position] + len(adapter)
            if position and slot in self.prompt_logprobs:
                self.prompt_logprobs[slot].append(-float(tokens[position]))
        self.computed[slot] = end = start + num_tokens
        context = [self.blocks[table[p // self.block_size]][p % self.block_size] for p in range(end)]
        assert context == [(adapter, token) for token in tokens[:end]], "a block holds something else than this sequence's tokens"
        assert samples == (end == len(tokens)), "a row samples exactly when it has reached the last known token"
        if not samples:
            return None
        if self.slots[slot].pooling:
            last = float("inf") if adapter in self.overflowing else float(next_token(adapter, tokens[:end]))
            self.embeddings.append([self.sums[slot] / end, last])
            return None
        tokens.append(next_token(adapter, tokens[:end]))
        return tokens[-1]

    def _adapter(self, slot: int) -> str:
        pages = {self.pages[page_id] for page_id in self.slots[slot].page_ids}
        assert len(pages) <= 1, "an adapter's pages hold that adapter"
        return pages.pop() if pages else ""
