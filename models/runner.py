"""Runs one rank: applies each step of the driver to the model, answers with new tokens and embeddings. Schedules nothing."""

import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
import torch
from torch import Tensor
from transformers import AutoConfig

from loray.kernels import native
from loray.kernels.choice import uses_triton
from loray.kernels.greedy import greedy
from loray.kernels.varlen_attention import shown_backend
from loray.models.attention_groups import GroupPlanner
from loray.models.batch import Batch
from loray.models.born_on import born_on
from loray.models.converted import cache_folder
from loray.models.cuda_graph import CAPTURED, DecodeGraphs, DecodeOutput
from loray.models.decode_inputs import DecodeInputs
from loray.models.device_memory import all_fit, free_bytes, must_fit, release, weights_fit
from loray.models.device_support import check_device
from loray.models.grammar_masks import GrammarMasks
from loray.models.kv_cache import FLOAT8, KVCache
from loray.models.kv_scales import NUM_TOKENS, measured_scales, random_prompt
from loray.models.launched import Launched
from loray.models.layout import Layout, lay_out
from loray.models.loader import held_bytes, load_weights
from loray.models.lora import LoraPool
from loray.models.lora_groups import special_rows
from loray.models.paged_table import PagedTable
from loray.models.parallel import Parallel
from loray.models.planner import Planner
from loray.models.pooler import Pooler
from loray.models.prompt_logprobs import MAX_PIECE, PromptLogprobs
from loray.models.recorded_decodes import RecordedDecodes
from loray.models.registry import model_class
from loray.models.runner_sizes import RunnerOptions, RunnerSizes
from loray.models.slot_sampling import Drawn, SlotSampling
from loray.models.slots import Slots
from loray.models.step import Admission, LoadReport, Row, Sampling, Step, StepResult
from loray.models.to_device import upload
from loray.models.to_host import ToHost
from loray.models.warm_up import StepLimits, warm_up_steps

logger = logging.getLogger("loray.runner")
FEWER_BLOCKS = 0.9  # of those that did not fit


class Runner:
    """One owner of everything a rank keeps: weights, KV blocks, rank pages, and the state of each slot."""

    def __init__(
        self,
        model_path: Path,
        parallel: Parallel,
        device: torch.device,
        dtype: torch.dtype,
        sizes: RunnerSizes,
        options: RunnerOptions | None = None,
    ) -> None:
        started = time.perf_counter()
        options = options or RunnerOptions()
        if device.type == "cpu":
            native.prepare(cache_folder() / "native")
        check_device(device, None, options.has_float8_cache, options.has_float8_weights)
        config = AutoConfig.from_pretrained(model_path)
        with weights_fit(device), born_on(device, dtype), torch.inference_mode():
            self._model = model_class(config)(config, parallel, sizes.max_total_tokens)
            check_device(device, self._model.kv_shape[2])
            load_weights(self._model, model_path, options.has_float8_weights)
        if options.has_float8_weights:
            release(device)  # the weights as they were read
        self._load_seconds = time.perf_counter() - started
        self._vocab_size = int(config.get_text_config().vocab_size)
        self._parallel, self._all_fit = parallel, partial(all_fit, parallel, device)
        self._device, self._dtype, self._sizes, self._block_size = device, dtype, sizes, sizes.block_size
        self._lora = LoraPool(self._model, parallel)
        self.host_adapters = self._lora.host
        self._slots = Slots.empty(sizes.max_running, max_blocks=-(-sizes.max_total_tokens // sizes.block_size) + 1)
        # One column more: a row that runs one step beyond its end samples a token nobody reads. One row more, for rows of nobody.
        self._tokens = torch.zeros(sizes.max_running + 1, sizes.max_total_tokens + 1, dtype=torch.int32, device=device)
        self._table = PagedTable(self._slots, sizes, device) if uses_triton(device) else None
        attention = self._table or GroupPlanner(self._slots, sizes.block_size, dtype, device, self._model.windows)
        self._planner = Planner(self._tokens, attention, self._lora.specials, dtype)
        self._pooler = Pooler()
        self._prompts = PromptLogprobs()
        self.grammars = GrammarMasks(model_path, options.trust_remote_code, is_timed=parallel.rank == 0)
        self._sampling = SlotSampling(self._tokens, self.grammars, parallel)
        self._has_float8_cache = options.has_float8_cache
        self._scales: Tensor | None = None  # [num_layers, 2] float32, of a float8 cache
        self._kv_cache: KVCache | None = None
        self._graphs: DecodeGraphs | None = None
        self._recorded: RecordedDecodes | None = None
        self._last: Launched | None = None
        self._last_slots: set[int] = set()

    def report(self, memory_fraction: float) -> LoadReport:
        num_layers, num_kv_heads, head_dim = self._model.kv_shape
        return LoadReport(
            device=torch.cuda.get_device_name(self._device) if self._device.type == "cuda" else "cpu",
            dtype=str(self._dtype).removeprefix("torch."),
            attention=shown_backend(self._device, self._dtype, self._kv_dtype, head_dim, self._model.score_cap),
            weight_bytes=held_bytes(self._model),
            load_seconds=self._load_seconds,
            block_bytes=num_layers * self._block_size * 2 * num_kv_heads * head_dim * self._kv_dtype.itemsize,
            page_bytes=self._lora.page_bytes,
            free_bytes=free_bytes(self._device, memory_fraction),
            has_blocks=True,
            lora_shapes=self._lora.shapes,
            captured=CAPTURED if self._device.type == "cuda" else None,
        )

    def allocate(self, num_blocks: int, num_pages: int) -> int:
        """How many blocks it came to, the same on every rank: fewer where so many do not fit."""
        with born_on(self._device, self._dtype), torch.inference_mode():
            if not self._all_fit(partial(self._lora.allocate, num_pages)):
                raise MemoryError(f"there is no room for {num_pages} rank pages of {self._lora.page_bytes} bytes; lower adapters.gpu_bytes")
            if self._has_float8_cache:
                self._measure_scales()
        while not self._has_room(num_blocks, num_pages):
            fewer = int(num_blocks * FEWER_BLOCKS)
            logger.warning("out of memory with %d KV blocks: trying %d; a lower kv_cache.memory_fraction avoids this", num_blocks, fewer)
            if not fewer:
                raise MemoryError("there is no room for a single KV block")
            num_blocks = fewer
        return num_blocks

    def _has_room(self, num_blocks: int, num_pages: int) -> bool:
        """Makes the cache and tries the steps that take most; makes the graphs, which take long, and tries again beside them."""
        with born_on(self._device, self._dtype), torch.inference_mode():
            has_room = self._all_fit(partial(self._make_pools, num_blocks))
        if has_room and self._table:
            steps = warm_up_steps(StepLimits(self._sizes, num_blocks, num_pages))
            has_room = self._all_steps_fit(steps)
            if has_room and self._graphs:
                with born_on(self._device, self._dtype), torch.inference_mode():
                    has_room = self._graphs.capture(num_pages > 0, self._parallel, self._device)
                has_room = has_room and self._all_steps_fit(steps)
            if has_room and not self._parallel.is_alone:
                with must_fit():  # what carries the sums takes memory too, when it is first used
                    for step in steps:
                        self.execute(step)
        if not has_room:
            self._kv_cache = self._graphs = self._recorded = self._last = None
            release(self._device)
        return has_room

    def _all_steps_fit(self, steps: Sequence[Step]) -> bool:
        return all(self._all_fit(partial(self.execute, step)) for step in steps)

    def _make_pools(self, num_blocks: int) -> None:
        self._kv_cache = cache = self._make_cache(num_blocks, self._scales)
        if self._device.type == "cuda" and self._table:
            max_rows = max(len(self._tokens) - 1, CAPTURED.max_tokens)
            self._graphs = DecodeGraphs(DecodeInputs(max_rows, self._tokens, self._table.blocks), self._decode)
        elif native.has_linear() and native.serves(self._device, self._dtype) and self._parallel.is_alone:
            self._recorded = RecordedDecodes(lambda batch: self._model.hidden(batch, cache.layers), self._slots.block_table.shape[1])

    @property
    def _kv_dtype(self) -> torch.dtype:
        return FLOAT8 if self._has_float8_cache else self._dtype

    def _make_cache(self, num_blocks: int, scales: Tensor | None) -> KVCache:
        num_layers, num_kv_heads, head_dim = self._model.kv_shape
        return KVCache(num_layers, num_blocks, (self._block_size, num_kv_heads, head_dim), scales)

    def _measure_scales(self) -> None:
        num_tokens = min(NUM_TOKENS, self._tokens.shape[1] - 1)
        num_blocks = -(-num_tokens // self._block_size)
        prompt = random_prompt(self._vocab_size, num_tokens)
        step = Step(0, [], [Admission(0, prompt, [], 0, [], Sampling())], [Row(0, num_tokens, list(range(num_blocks)), True)])

        def make(scales: Tensor | None) -> KVCache:
            cache = self._make_cache(num_blocks, scales)
            for blocks, _ in cache.layers:
                blocks.zero_()
            return cache

        def last_logits(cache: KVCache) -> Tensor:
            self._admit(step.admissions[0])
            self._extend(step, cache)
            batch = self._planner.batch(lay_out(step.rows, self._slots, self._block_size))
            return self._model.logits(self._model.hidden(batch, cache.layers)[-self._block_size :], batch)

        self._scales = measured_scales(make, last_logits, self._all_fit)

    def _decode(self, batch: Batch) -> DecodeOutput:
        assert self._kv_cache is not None
        logits = self._model.logits(self._model.hidden(batch, self._kv_cache.layers), batch)
        return DecodeOutput(logits, *greedy(logits))

    def execute(self, step: Step) -> StepResult:
        return self.launch(step).result()

    def waits_for(self, step: Step) -> bool:
        """Whether launching the step waits for those before: who wants their results had better fetch them first."""
        return self._sampling.needs_tokens(step)

    @torch.inference_mode()
    def launch(self, step: Step) -> Launched:
        """What the step yields is fetched when it is asked for; the next may be launched before. Never two ahead."""
        if self._last is not None and self._needs_last(step):
            self._last.result()
        failed_loads = self._lora.load_all(step.loads, step.freed_pages)
        load_time = self._lora.load_time
        self._sampling.admit(step.admissions)
        for admission in step.admissions:
            self._admit(admission)
        if not step.rows:
            empty = StepResult(step.step_id, [], [], failed_loads)
            return Launched(lambda: msgspec.structs.replace(empty, load_seconds=load_time.whole_seconds()), lambda: load_time.is_over)
        drawn, layout, embeddings = self._compute(step)
        prompts = dict(self._prompts.take(layout.sample_slots[layout.result_order].tolist()))

        def fetch() -> StepResult:
            sampled = self._sampling.fetch(drawn).ordered(layout.result_order)
            return StepResult(
                step.step_id,
                sampled.token_ids,
                sampled.logprobs,
                failed_loads,
                [embedding.tolist() for embedding in embeddings.wait()],
                load_time.seconds(),
                failed_rows=self._sampling.failed(step.rows),
                alternatives=sampled.alternatives,
                prompt_logprobs={place: scores.logprobs for place, scores in prompts.items()},
                prompt_alternatives={place: found for place, scores in prompts.items() if (found := scores.alternatives)},
            )

        self._last, self._last_slots = Launched(fetch, lambda: drawn.tokens.is_done and embeddings.is_done), {row.slot for row in step.rows}
        return self._last

    def _needs_last(self, step: Step) -> bool:
        """Whether tokens of the step before decide what a grammar allows next, or belong to slots as they were before the step."""
        bound = self._last_slots.intersection(admission.slot for admission in step.admissions if admission.sampling.grammar)
        return bool(bound) or self.grammars.holds(row.slot for row in step.rows if row.slot in self._last_slots)

    def _compute(self, step: Step) -> tuple[Drawn, Layout, ToHost]:
        """New tokens in the order of the layout's logits, and embeddings in the order of the rows."""
        assert self._kv_cache is not None, "a step came before allocate"
        self._extend(step, self._kv_cache)
        layout = lay_out(self._pooler.without_samples(step.rows), self._slots, self._block_size)
        if self._graphs is not None and self._is_plain(step.rows, layout) and self._graphs.can_run(layout):
            drawn, embeddings = self._replay(layout, self._graphs), ToHost()
        else:
            batch = self._planner.batch(layout)
            hidden = self._recorded.hidden(batch) if self._recorded else self._model.hidden(batch, self._kv_cache.layers)
            self._score_prompts(step.rows, layout, batch, hidden)
            drawn = self._sample(layout, batch, hidden)
            embeddings = self._pooler.pool(step.rows, layout.first_tokens, hidden)
        for row in step.rows:
            self._slots.num_computed[row.slot] += row.num_tokens
        return drawn, layout, embeddings

    def _is_plain(self, rows: list[Row], layout: Layout) -> bool:
        """Whether nothing but tokens is wanted, and no adapter has more than pages."""
        specials = special_rows(layout.runs, layout.num_tokens.tolist(), layout.samples.tolist(), self._lora.specials)
        return not any(specials) and not any(row.slot in self._prompts or row.slot in self._pooler for row in rows)

    def _replay(self, layout: Layout, graphs: DecodeGraphs) -> Drawn:
        logits, token_ids, logprobs = graphs.run(layout)
        if self._sampling.is_plain(layout.sample_slots):
            return Drawn(layout.sample_slots.tolist(), ToHost(token_ids, logprobs), ToHost(), {})
        return self._sampling.sample(logits, layout.sample_slots, layout.sample_positions)

    def _sample(self, layout: Layout, batch: Batch, hidden: Tensor) -> Drawn:
        """The tokens feed the next step. hidden: [num_tokens, hidden] of the batch."""
        if not layout.samples.any():
            return Drawn([], ToHost(*torch.empty(2, 0, device=self._device)), ToHost(), {})
        last = hidden if batch.sample_tokens is None else hidden[batch.sample_tokens]  # [num_samples, hidden]
        return self._sampling.sample(self._model.logits(last, batch), layout.sample_slots, layout.sample_positions)

    def _score_prompts(self, rows: list[Row], layout: Layout, batch: Batch, hidden: Tensor) -> None:
        """hidden: [num_tokens, hidden] of the batch."""
        for row, first in zip(rows, layout.first_tokens.tolist(), strict=True):
            if row.slot not in self._prompts:
                continue
            for piece in hidden[first : first + row.num_tokens].split(MAX_PIECE):
                specials = special_rows([self._slots.runs[row.slot]], [len(piece)], [len(piece)], self._lora.specials)
                self._prompts.add(row.slot, self._model.logits(piece, replace(batch, specials=tuple(specials))))

    def _admit(self, admission: Admission) -> None:
        self._lora.wait(admission.page_ids)
        self._slots.admit(admission)
        self._pooler.admit(admission)
        self._prompts.admit(admission)
        self._tokens[admission.slot, : len(admission.token_ids)] = upload(np.array(admission.token_ids, np.int32), self._device)

    def _extend(self, step: Step, kv_cache: KVCache) -> None:
        for row in step.rows:
            self._slots.extend(row)
        if self._table is not None:
            return self._table.update(step.admissions, step.rows)
        new_blocks = [block_id for row in step.rows for block_id in row.new_block_ids]
        if new_blocks:
            kv_cache.clear(upload(np.array(new_blocks), self._device))
