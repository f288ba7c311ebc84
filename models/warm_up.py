"""Steps of the kinds that are not replayed, once each, before the first request: kernels are compiled and libraries loaded while nobody
waits."""

from collections.abc import Callable

from loray.models.cuda_graph import CAPTURED
from loray.models.step import Admission, Row, Sampling, Step, StepResult

ANY_SAMPLING = Sampling(temperature=0.8, top_k=40, top_p=0.9, typical_p=0.9, repetition_penalty=1.1, num_alternatives=2)


def warm_up(execute: Callable[[Step], StepResult], max_running: int, max_tokens: int, block_size: int, has_lora: bool) -> None:
    """What it leaves in blocks and slots is overwritten before anybody reads it. max_tokens: of a sequence, of which two fit."""
    num_prompt = min(CAPTURED.max_tokens + 1, max_tokens - 1)
    if num_prompt < 1:
        return
    size = -(-(num_prompt + 1) // block_size)
    for page_ids in ([], [0]) if has_lora else ([],):
        prompts = [Admission(slot, [0] * num_prompt, [], 0, page_ids, sampling) for slot, sampling in enumerate((Sampling(), ANY_SAMPLING))]
        rows = [Row(slot, num_prompt, list(range(slot * size, (slot + 1) * size)), True) for slot in (0, 1)]
        execute(Step(0, [], prompts[:1], rows[:1]))
        if max_running > 1:
            execute(Step(0, [], prompts[1:], [Row(0, 1, [], True), rows[1]]))
