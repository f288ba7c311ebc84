"""Runs one rank: applies each step of the driver to the model, answers with new tokens and embeddings. Schedules nothing."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoConfig

from loray.models import attention
from loray.models.device_memory import free_bytes
from loray.models.grammar_masks import GrammarMasks
from loray.models.kv_cache import KVCache
from loray.models.loader import load_weights
from loray.models.lora import LoraPool
from loray.models.lora_groups import special_rows
from loray.models.parallel import Parallel
from loray.models.planner import Plan, Planner
from loray.models.pooler import Pooler
from loray.models.prompt_logprobs import MAX_PIECE, PromptLogprobs
from loray.models.registry import model_class
from loray.models.slot_sampling import Sampled, SlotSampling
from loray.models.slots import Slots
from loray.models.step import Admission, LoadReport, Row, Step, StepResult


class Runner:
    """One owner of everything a rank keeps: weights, KV blocks, rank pages, and the state of each slot."""

    def __init__(
        self,
        model_path: Path,
        parallel: Parallel,
        device: torch.device,
        dtype: torch.dtype,
        max_running: int,
        max_total_tokens: int,
        block_size: int = 16,
    ) -> None:
        started = time.perf_counter()
        config = AutoConfig.from_pretrained(model_path)
        with _born_on(device, dtype), torch.inference_mode():
            self._model = model_class(config)(config, parallel, max_total_tokens)
            self._weight_bytes = load_weights(self._model, model_path)
        self._load_seconds = time.perf_counter() - started
        self._device, self._dtype, self._block_size = device, dtype, block_size
        self._lora = LoraPool(self._model, parallel)
        self.host_adapters = self._lora.host
        self._slots = Slots.empty(max_running, max_blocks=-(-max_total_tokens // block_size) + 1)
        # One column more: a row that runs one step beyond its end samples a token nobody reads.
        self._tokens = torch.zeros(max_running, max_total_tokens + 1, dtype=torch.int32, device=device)
        self._planner = Planner(self._slots, self._tokens, block_size, dtype, self._model.windows, self._lora.specials)
        self._pooler = Pooler()
        self._prompts = PromptLogprobs()
        self.grammars = GrammarMasks(model_path, is_timed=parallel.rank == 0)
        self._sampling = SlotSampling(self._tokens, self.grammars, parallel)
        self._kv_cache: KVCache | None = None

    def report(self, memory_fraction: float) -> LoadReport:
        num_layers, num_kv_heads, head_dim = self._model.kv_shape
        return LoadReport(
            device=torch.cuda.get_device_name(self._device) if self._device.type == "cuda" else "cpu",
            dtype=str(self._dtype).removeprefix("torch."),
            attention=attention.BACKEND,
            weight_bytes=self._weight_bytes,
            load_seconds=self._load_seconds,
            block_bytes=num_layers * self._block_size * 2 * num_kv_heads * head_dim * self._dtype.itemsize,
            page_bytes=self._lora.page_bytes,
            free_bytes=free_bytes(self._device, memory_fraction),
            has_blocks=True,
            lora_shapes=self._lora.shapes,
        )

    def allocate(self, num_blocks: int, num_pages: int) -> None:
        num_layers, num_kv_heads, head_dim = self._model.kv_shape
        with _born_on(self._device, self._dtype), torch.inference_mode():
            self._kv_cache = KVCache(num_layers, num_blocks, self._block_size, num_kv_heads, head_dim)
            self._lora.allocate(num_pages)

    @torch.inference_mode()
    def execute(self, step: Step) -> StepResult:
        failed_loads = self._lora.load_all(step.loads, step.freed_pages)
        self._sampling.admit(step.admissions)
        for admission in step.admissions:
            self._admit(admission)
        if not step.rows:
            return StepResult(step.step_id, [], [], failed_loads, load_seconds=self._lora.load_seconds)
        assert self._kv_cache is not None, "a step came before allocate"
        self._extend(step.rows, self._kv_cache)
        plan = self._planner.plan(self._pooler.without_samples(step.rows))
        hidden = self._model.hidden(plan.batch, self._kv_cache.layers)
        for row in step.rows:
            self._slots.num_computed[row.slot] += row.num_tokens
        self._score_prompts(step.rows, plan, hidden)
        sampled = self._sample(plan, hidden)
        embeddings = self._pooler.pool(step.rows, plan.first_tokens, hidden)
        prompts = dict(self._prompts.take(plan.sample_slots[plan.result_order].tolist()))
        return StepResult(
            step.step_id,
            sampled.token_ids,
            sampled.logprobs,
            failed_loads,
            embeddings,
            self._lora.load_seconds,
            failed_rows=self._sampling.failed(step.rows),
            alternatives=sampled.alternatives,
            prompt_logprobs={place: scores.logprobs for place, scores in prompts.items()},
            prompt_alternatives={place: scores.alternatives for place, scores in prompts.items() if scores.alternatives},
        )

    def _sample(self, plan: Plan, hidden: Tensor) -> Sampled:
        """In the order of the step's rows; the tokens feed the next step."""
        if not len(plan.sample_slots):
            return Sampled([], [], {})
        last = hidden if plan.batch.sample_tokens is None else hidden[plan.batch.sample_tokens]  # [num_samples, hidden]
        logits = self._model.logits(last, plan.batch)
        return self._sampling.sample(logits, plan.sample_slots, plan.sample_positions).ordered(plan.result_order.tolist())

    def _score_prompts(self, rows: list[Row], plan: Plan, hidden: Tensor) -> None:
        """hidden: [num_tokens, hidden] of the batch."""
        for row, first in zip(rows, plan.first_tokens.tolist(), strict=True):
            if row.slot not in self._prompts:
                continue
            for piece in hidden[first : first + row.num_tokens].split(MAX_PIECE):
                specials = special_rows([self._slots.runs[row.slot]], [len(piece)], [len(piece)], self._lora.specials)
                self._prompts.add(row.slot, self._model.logits(piece, replace(plan.batch, specials=tuple(specials))))

    def _admit(self, admission: Admission) -> None:
        self._slots.admit(admission)
        self._pooler.admit(admission)
        self._prompts.admit(admission)
        token_ids = torch.tensor(admission.token_ids, dtype=torch.int32)
        self._tokens[admission.slot, : len(token_ids)] = token_ids.to(self._device, non_blocking=True)

    def _extend(self, rows: list[Row], kv_cache: KVCache) -> None:
        new_blocks = []
        for row in rows:
            self._slots.extend(row)
            new_blocks += row.new_block_ids
        if new_blocks:
            kv_cache.clear(torch.tensor(new_blocks).to(self._device, non_blocking=True))


@contextmanager
def _born_on(device: torch.device, dtype: torch.dtype) -> Iterator[None]:
    """Tensors made inside lie on this device, floats among them in this dtype."""
    previous = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with device:
            yield
    finally:
        torch.set_default_dtype(previous)
