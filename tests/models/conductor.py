"""A driver as small as can be: plays requests on a Runner, alone or together, whole or in chunks."""

from dataclasses import dataclass, field
from pathlib import Path

import torch

from loray.models.parallel import Parallel
from loray.models.runner import Runner
from loray.models.runner_sizes import RunnerOptions, RunnerSizes
from loray.models.step import AdapterLoad, Admission, Alternatives, Row, RowFailure, Sampling, Step, StepResult

BLOCK_SIZE = 16


@dataclass
class Request:
    prompt: list[int]
    page_ids: list[int] = field(default_factory=list)
    sampling: Sampling = field(default_factory=Sampling)
    num_new: int = 8
    output: list[int] = field(default_factory=list)  # generated before
    wants_prompt_logprobs: bool = False


@dataclass
class Output:
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    alternatives: list[Alternatives] = field(default_factory=list)
    prompt_logprobs: list[float] = field(default_factory=list)
    prompt_alternatives: list[Alternatives] = field(default_factory=list)
    failures: set[RowFailure] = field(default_factory=set)


class Conductor:
    def __init__(
        self,
        folder: Path,
        parallel: Parallel | None = None,
        device: str = "cpu",
        dtype: torch.dtype = torch.float32,
        max_running: int = 16,
        max_total_tokens: int = 128,
        num_pages: int = 32,
        has_float8_cache: bool = False,
        has_float8_weights: bool = False,
    ) -> None:
        sizes = RunnerSizes(max_running, max_total_tokens, BLOCK_SIZE)
        options = RunnerOptions(has_float8_cache=has_float8_cache, has_float8_weights=has_float8_weights)
        self.runner = Runner(folder, parallel or Parallel(), torch.device(device), dtype, sizes, options)
        self.report = self.runner.report(0.5)
        self.max_blocks = -(-(max_total_tokens + 1) // BLOCK_SIZE)
        self.runner.allocate(max_running * self.max_blocks, num_pages)
        self.step_id = 0
        self.result: StepResult  # of the latest step

    def step(
        self, rows: list[Row] | None = None, admissions: list[Admission] | None = None, loads: list[AdapterLoad] | None = None
    ) -> tuple[list[int], list[float], dict[int, str]]:
        self.step_id += 1
        result = self.runner.execute(Step(self.step_id, loads or [], admissions or [], rows or []))
        assert result.step_id == self.step_id
        self.result = result
        return result.token_ids, result.logprobs, result.failed_loads

    def load(self, folder: Path, page_ids: list[int]) -> None:
        assert self.step(loads=[AdapterLoad(str(folder), page_ids)])[2] == {}

    def blocks(self, slot: int, start: int, end: int) -> list[int]:
        """Ids of the blocks that tokens start..end need beyond those before start: scattered over the pool, every slot its own."""
        first, last = -(-start // BLOCK_SIZE), -(-end // BLOCK_SIZE)
        spread = [(slot + 7 * i) % 16 + 16 * i for i in range(self.max_blocks)]
        return spread[first:last]

    def play(self, requests: list[Request], chunk: int = 10_000, stagger: int = 0) -> list[Output]:
        """Request i starts stagger * i steps late, so that prefills meet decodes."""
        outputs = [Output() for _ in requests]
        computed = [0] * len(requests)
        clock = 0
        while any(len(output.token_ids) < request.num_new for output, request in zip(outputs, requests, strict=True)):
            rows, admissions, sampling = [], [], []
            for slot, (request, output) in enumerate(zip(requests, outputs, strict=True)):
                if clock < slot * stagger or len(output.token_ids) == request.num_new:
                    continue
                if computed[slot] == 0:
                    token_ids, wants = request.prompt + request.output, request.wants_prompt_logprobs
                    admissions.append(Admission(slot, token_ids, [], 0, request.page_ids, request.sampling, "", len(request.output), wants))
                left = len(request.prompt) + len(request.output) + len(output.token_ids) - computed[slot]
                size = min(chunk, left)
                rows.append(Row(slot, size, self.blocks(slot, computed[slot], computed[slot] + size), samples=size == left))
                computed[slot] += size
                sampling += [slot] * (size == left)
            token_ids, logprobs, _ = self.step(rows, admissions)
            for slot, token_id, logprob in zip(sampling, token_ids, logprobs, strict=True):
                outputs[slot].token_ids.append(token_id)
                outputs[slot].logprobs.append(logprob)
            self._note(self.result, rows, sampling, outputs)
            clock += 1
        return outputs

    def _note(self, result: StepResult, rows: list[Row], sampling: list[int], outputs: list[Output]) -> None:
        """What a step brings beside tokens. sampling: the slots that got one."""
        for place, alternatives in result.alternatives.items():
            outputs[sampling[place]].alternatives.append(alternatives)
        for place, logprobs in result.prompt_logprobs.items():
            outputs[sampling[place]].prompt_logprobs += logprobs
            outputs[sampling[place]].prompt_alternatives += result.prompt_alternatives.get(place, [])
        for place, failure in result.failed_rows.items():
            outputs[rows[place].slot].failures.add(failure)

    def generate(self, prompt: list[int], page_ids: list[int] | None = None, num_new: int = 8) -> Output:
        return self.play([Request(prompt, page_ids or [], num_new=num_new)])[0]


def pipelined(conductor: Conductor, requests: list[Request], num_new: int) -> list[list[int]]:
    """As a rank does it: each step is launched before the results of the one before are fetched."""
    rows = [Row(i, len(r.prompt), conductor.blocks(i, 0, len(r.prompt)), True) for i, r in enumerate(requests)]
    admissions = [Admission(i, r.prompt, [], 0, r.page_ids, r.sampling) for i, r in enumerate(requests)]
    launched = conductor.runner.launch(Step(1, [], admissions, rows))
    outputs: list[list[int]] = [[] for _ in requests]
    for number in range(1, num_new + 1):
        following = None
        if number < num_new:
            lengths = [len(r.prompt) + number - 1 for r in requests]
            decodes = [Row(i, 1, conductor.blocks(i, length, length + 1), True) for i, length in enumerate(lengths)]
            following = conductor.runner.launch(Step(number + 1, [], [], decodes))
        for output, token_id in zip(outputs, launched.result().token_ids, strict=True):
            output.append(token_id)
        if following:
            launched = following
    return outputs


def prompt_of(length: int, seed: int = 0, vocab_size: int = 101) -> list[int]:
    return torch.randint(0, vocab_size, (length,), generator=torch.Generator().manual_seed(seed)).tolist()
