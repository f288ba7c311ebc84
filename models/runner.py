"""Runs one rank: applies each step of the driver to the model and answers with the new tokens. Schedules nothing."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import AutoConfig

from loray.models import attention
from loray.models.adapter import AdapterError, signature
from loray.models.kv_cache import KVCache
from loray.models.loader import load_weights
from loray.models.lora import LoraPool
from loray.models.parallel import Parallel
from loray.models.planner import Planner
from loray.models.registry import model_class
from loray.models.sampler import sample
from loray.models.slots import Slots
from loray.models.step import AdapterLoad, Admission, LoadReport, Row, Step, StepResult


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
        self._parallel, self._device, self._dtype, self._block_size = parallel, device, dtype, block_size
        self._lora = LoraPool(self._model)
        self._slots = Slots.empty(max_running, max_blocks=-(-max_total_tokens // block_size) + 1)
        # One column more: a row that runs one step beyond its end samples a token nobody reads.
        self._tokens = torch.zeros(max_running, max_total_tokens + 1, dtype=torch.int32, device=device)
        self._planner = Planner(self._slots, self._tokens, block_size, dtype, self._model.windows)
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
            free_bytes=self._free_bytes(memory_fraction),
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
        failed_loads = self._load_adapters(step.loads)
        for admission in step.admissions:
            self._admit(admission)
        if not step.rows:
            return StepResult(step.step_id, [], [], failed_loads)
        assert self._kv_cache is not None, "a step came before allocate"
        self._extend(step.rows, self._kv_cache)
        plan = self._planner.plan(step.rows)
        logits = self._model(plan.batch, self._kv_cache.layers)
        for row in step.rows:
            self._slots.num_computed[row.slot] += row.num_tokens
        if not len(plan.sample_slots):
            return StepResult(step.step_id, [], [], failed_loads)
        token_ids, logprobs = sample(logits, self._slots.sampling(plan.sample_slots, plan.sample_positions))
        places = torch.from_numpy(plan.sample_slots * self._tokens.shape[1] + plan.sample_positions).to(self._device)
        self._tokens.view(-1).index_copy_(0, places, token_ids.int())
        return StepResult(step.step_id, _ordered(token_ids, plan.result_order), _ordered(logprobs, plan.result_order), failed_loads)

    def _load_adapters(self, loads: list[AdapterLoad]) -> dict[int, str]:
        """Index in loads -> why it failed. Ranks agree: an adapter that one of them cannot read counts as failed on all."""
        reasons: dict[int, str] = {}
        for index, load in enumerate(loads):
            try:
                self._check_signature(load)
                self._lora.load(Path(load.path), load.page_ids)
                self._check_signature(load)
            except AdapterError as error:
                reasons[index] = str(error)
        if not loads:
            return reasons
        failed = self._parallel.any_rank([index in reasons for index in range(len(loads))], self._device)
        return {i: reasons.get(i, "another rank could not read the adapter") for i, is_failed in enumerate(failed) if is_failed}

    @staticmethod
    def _check_signature(load: AdapterLoad) -> None:
        if load.signature and load.signature != signature(Path(load.path)):
            raise AdapterError(f"adapter {Path(load.path).name!r}: its files changed after they were checked")

    def _admit(self, admission: Admission) -> None:
        self._slots.admit(admission)
        token_ids = torch.tensor(admission.token_ids, dtype=torch.int32)
        self._tokens[admission.slot, : len(token_ids)] = token_ids.to(self._device, non_blocking=True)

    def _extend(self, rows: list[Row], kv_cache: KVCache) -> None:
        new_blocks = []
        for row in rows:
            self._slots.extend(row)
            new_blocks += row.new_block_ids
        if new_blocks:
            kv_cache.clear(torch.tensor(new_blocks).to(self._device, non_blocking=True))

    def _free_bytes(self, memory_fraction: float) -> int:
        """What may still be taken on the GPU so that memory_fraction of it is in use; the rest is for activations."""
        if self._device.type != "cuda":
            return 0
        free, total = torch.cuda.mem_get_info(self._device)
        return max(0, int(total * memory_fraction) - (total - free))


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


def _ordered(values: Tensor, order: NDArray[np.int64]) -> list[Any]:
    return values.cpu().numpy()[order].tolist()
