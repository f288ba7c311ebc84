"""Small steps captured as CUDA graphs, one for each number of tokens, with and without LoRA: a step is one launch, not hundreds.

They read and write fixed buffers alone, so they stay valid whatever sequences run and whatever adapters are in the pages.
"""

import gc
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from loray.models.adapter import PAGE_RANK
from loray.models.batch import Batch
from loray.models.decode_inputs import MAX_PAGES, DecodeInputs
from loray.models.device_memory import all_fit, fits, must_fit
from loray.models.layout import Layout
from loray.models.parallel import Parallel
from loray.models.progress import with_progress
from loray.models.step import CapturedSteps
from loray.models.to_device import upload

logger = logging.getLogger("loray.graphs")
CAPTURE_S = 60.0  # then no more are captured; steps of the sizes that are missing take the next larger ones
CAPTURED = CapturedSteps(max_tokens=512, max_scores=1 << 18)  # beyond, a prompt's keys are read too often, once for each query


class DecodeOutput(NamedTuple):
    """Overwritten by the next decode."""

    logits: Tensor  # [rows, vocab_size]
    token_ids: Tensor  # [rows] int64, the most probable
    logprobs: Tensor  # [rows] float32


Decode = Callable[[Batch], DecodeOutput]


@contextmanager
def no_garbage_collected() -> Iterator[None]:
    """A graph that is found to be garbage and freed while another is captured spoils that one."""
    gc.collect()
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class DecodeGraphs:
    def __init__(self, inputs: DecodeInputs, decode: Decode) -> None:
        self._inputs = inputs
        self._decode = decode
        self._sizes = sizes_up_to(inputs.max_rows)
        self._graphs: dict[tuple[int, bool], torch.cuda.CUDAGraph] = {}  # by rows, and whether there is LoRA
        self._output: DecodeOutput | None = None  # of them all, [max_rows] each: logits of their own would take a gigabyte

    @no_garbage_collected()
    def capture(self, has_lora: bool, parallel: Parallel, device: torch.device) -> bool:
        """Whether there was room. All ranks stop at the same graph, whatever the reason and whichever rank has it.

        has_lora: whether there are rank pages at all."""
        started = time.monotonic()
        wanted = [(size, lora) for size in reversed(self._sizes) for lora in ((False, True) if has_lora else (False,))]
        pool = torch.cuda.graph_pool_handle()
        for size, lora in with_progress(wanted, "capturing decodes", "graph"):
            if not all_fit(parallel, device, partial(self._run, size, lora)):  # kernels are compiled, libraries take their workspaces
                return False
            if not parallel.is_alone:
                with must_fit():
                    self._run(size, lora)  # as do those that carry the sums
            is_there = fits(partial(self._capture, size, lora, pool))  # nothing is run, so nobody waits for a rank that has no room
            is_full, is_late = parallel.any_rank([not is_there, time.monotonic() - started > CAPTURE_S], device)
            if is_full:
                return False
            if is_late:
                break
        seconds, num_missing = time.monotonic() - started, len(wanted) - len(self._graphs)
        logger.info("captured %d decodes, up to %d rows, in %.1f s", len(self._graphs), self._sizes[-1], seconds)
        if num_missing:
            logger.warning("%d decodes were left out after %.0f s; smaller batches are padded", num_missing, seconds)
        return True

    def can_run(self, layout: Layout) -> bool:
        num_ranks = max((sum(end - start for start, end in runs) for runs in layout.runs), default=0)
        is_small = layout.is_decode or CAPTURED.has(len(layout.positions), layout.num_scores)
        return is_small and num_ranks <= MAX_PAGES * PAGE_RANK and self._size(layout) is not None

    def run(self, layout: Layout) -> DecodeOutput:
        """What the layout's samples come from, in their order."""
        size = self._size(layout)
        assert size is not None, "the caller asks can_run first"
        self._inputs.fill(layout, size)
        self._graphs[size, any(layout.runs)].replay()
        assert self._output is not None, "graphs are captured before they run"
        if layout.is_decode:
            return DecodeOutput(*(tensor[: len(layout.slots)] for tensor in self._output))
        places = upload(layout.sample_tokens, self._output.token_ids.device)
        return DecodeOutput(*(tensor[places] for tensor in self._output))

    def _size(self, layout: Layout) -> int | None:
        num_rows, lora = len(layout.positions), any(layout.runs)
        return next((size for size in self._sizes if size >= num_rows and (size, bool(lora)) in self._graphs), None)

    def _capture(self, size: int, lora: bool, pool: Any) -> None:
        graph = torch.cuda.CUDAGraph()
        # A capture that fails to end leaves its own stream current: the outer context brings back the one before.
        with torch.cuda.stream(torch.cuda.current_stream()), torch.cuda.graph(graph, pool=pool):
            self._run(size, lora)
        self._graphs[size, lora] = graph

    def _run(self, size: int, lora: bool) -> None:
        output = self._decode(self._inputs.batch(size, lora))
        self._inputs.keep(output.token_ids)
        if self._output is None:  # the first are the largest
            self._output = DecodeOutput(*(torch.empty_like(tensor) for tensor in output))
        for kept, tensor in zip(self._output, output, strict=True):
            kept[:size].copy_(tensor)


def sizes_up_to(max_rows: int) -> list[int]:
    """Batches are padded to the next of these: by few rows where a row more costs something."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 128, 16), *range(128, 256, 32), *range(256, max_rows, 64)]
    return [size for size in sizes if size < max_rows] + [max_rows]
