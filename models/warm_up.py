"""Steps of the kinds that are not replayed, before the first request: kernels are compiled and libraries loaded while nobody waits, and
what a step takes at most is known to fit. What they leave in blocks and slots is overwritten before anybody reads it."""

from collections.abc import Iterator
from dataclasses import dataclass

from loray.kernels.lora import SHORT_BLOCK
from loray.models.cuda_graph import CAPTURED
from loray.models.runner_sizes import RunnerSizes
from loray.models.step import Admission, Row, Sampling, Step

ANY_SAMPLING = Sampling(temperature=0.8, top_k=40, top_p=0.9, typical_p=0.9, repetition_penalty=1.1, num_alternatives=2)
MANY_PAGES = 3  # of an adapter: more ranks than a program multiplies at once, which takes another kernel than fewer


@dataclass(frozen=True, slots=True)
class StepLimits:
    """What no step goes beyond."""

    sizes: RunnerSizes
    num_blocks: int
    num_pages: int

    @property
    def longest(self) -> int:
        """Tokens of a sequence that has all blocks."""
        return min(self.sizes.max_total_tokens, self.num_blocks * self.sizes.block_size)


def warm_up_steps(limits: StepLimits) -> list[Step]:
    adapters = [list(range(min(count, limits.num_pages))) for count in (1, MANY_PAGES)] if limits.num_pages else []
    lengths = SHORT_BLOCK, CAPTURED.max_tokens + 1  # short blocks of LoRA's, and long ones
    embeddings = [
        _embedding(min(num_tokens, limits.longest, limits.sizes.max_batch_tokens), page_ids, limits)
        for page_ids in adapters
        for num_tokens in lengths
    ]
    most_keys = _most_tokens(adapters[-1] if adapters else [], limits)
    return [*_prompts(limits), *embeddings, _most_rows(limits), *_many_that_share(limits), most_keys]


def _prompts(limits: StepLimits) -> Iterator[Step]:
    """One that is too long for a graph, if it may be, and a second beside its decode, which wants the log-probabilities of its tokens."""
    most = min(limits.sizes.max_total_tokens, limits.sizes.max_batch_tokens, limits.num_blocks // 2 * limits.sizes.block_size)
    num_tokens = min(CAPTURED.max_tokens + 1, most - 1)
    if num_tokens < 1:
        return
    size = -(-(num_tokens + 1) // limits.sizes.block_size)
    prompts = [
        Admission(slot, [0] * num_tokens, [], 0, [], sampling, wants_prompt_logprobs=slot == 1)
        for slot, sampling in enumerate((Sampling(), ANY_SAMPLING))
    ]
    rows = [Row(slot, num_tokens, list(range(slot * size, (slot + 1) * size)), True) for slot in (0, 1)]
    yield Step(0, [], prompts[:1], rows[:1])
    if limits.sizes.max_running > 1:
        yield Step(0, [], prompts[1:], [Row(0, 1, [], True), rows[1]])


def _embedding(num_tokens: int, page_ids: list[int], limits: StepLimits) -> Step:
    """Never replayed, however short it is."""
    block_ids = list(range(-(-num_tokens // limits.sizes.block_size)))
    return Step(0, [], [Admission(0, [0] * num_tokens, [], 0, page_ids, Sampling(), "last")], [Row(0, num_tokens, block_ids, True)])


def _most_rows(limits: StepLimits) -> Step:
    """All of them sample."""
    slots = range(min(limits.sizes.max_running, limits.sizes.max_batch_tokens, limits.num_blocks))
    return Step(0, [], [Admission(slot, [0], [], 0, [], ANY_SAMPLING) for slot in slots], [Row(slot, 1, [slot], True) for slot in slots])


def _most_tokens(page_ids: list[int], limits: StepLimits) -> Step:
    """The last tokens of as many as have the most keys that are copied."""
    sizes = limits.sizes
    whole, rest = divmod(sizes.most_copied_keys, limits.longest)
    lengths = ([limits.longest] * whole + [rest] * (rest > 1))[: min(sizes.max_running, sizes.max_batch_tokens)]
    return _ends(lengths, sizes.max_batch_tokens // len(lengths), page_ids, limits)


def _many_that_share(limits: StepLimits) -> Iterator[Step]:
    """The last tokens of so many that all have too many keys to be copied, if there may be so many."""
    sizes = limits.sizes
    for num_new in range(2, min(2 * sizes.block_size, limits.longest + 1)):  # one alone would be a decode
        num_keys = (limits.longest - num_new) // sizes.block_size * sizes.block_size + num_new
        count = sizes.most_copied_keys // num_keys + 1
        if count <= sizes.max_running and count * num_new <= sizes.max_batch_tokens:
            yield _ends([limits.longest] * count, num_new, [], limits)
            return


def _ends(lengths: list[int], max_new: int, page_ids: list[int], limits: StepLimits) -> Step:
    """New tokens of sequences so long, which all lie in the same blocks. The keys before them are whatever lies there."""
    admissions, rows = [], []
    for slot, length in enumerate(lengths):
        num_new = min(length, max_new)
        num_cached = (length - num_new) // limits.sizes.block_size  # blocks
        block_ids = list(range(num_cached - (-num_new // limits.sizes.block_size)))
        num_computed = num_cached * limits.sizes.block_size
        token_ids = [0] * (num_computed + num_new)
        admissions.append(Admission(slot, token_ids, block_ids[:num_cached], num_computed, page_ids, Sampling()))
        rows.append(Row(slot, num_new, block_ids[num_cached:], True))
    return Step(0, [], admissions, rows)
