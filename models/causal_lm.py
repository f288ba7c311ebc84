"""Runs one rank whose model transformers computes, on padded batches: applies each step of the driver and answers with the new tokens.

Block ids are the driver's accounting here: keys and values lie in padded batches, so a cached prefix cannot be used again.
"""

import time
from functools import partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from loray.models.attention_groups import SMALLEST_CONTEXT
from loray.models.device_memory import fits, free_bytes, weights_fit
from loray.models.device_support import check_device
from loray.models.grammar_masks import GrammarMasks
from loray.models.hosted_model import Compute, HostedModel, HostedOptions
from loray.models.launched import Launched
from loray.models.lora import LoraPool
from loray.models.lora_groups import lora_work, sort_key, special_rows
from loray.models.padded_batch import PaddedBatch
from loray.models.prompt_logprobs import MAX_PIECE, PromptLogprobs
from loray.models.runner_sizes import RunnerSizes
from loray.models.slot_sampling import Sampled, SlotSampling
from loray.models.slots import Slots
from loray.models.step import Admission, LoadReport, Pooling, Row, Step, StepResult
from loray.models.to_device import upload

Ints = NDArray[np.int64]


class CausalLMRunner:
    """The same steps as Runner, for any AutoModelForCausalLM. One owner of the weights, the padded batches and the rank pages."""

    def __init__(
        self,
        model_path: Path,
        device: torch.device,
        dtype: torch.dtype,
        sizes: RunnerSizes,
        options: HostedOptions | None = None,
    ) -> None:
        started = time.perf_counter()
        options = options or HostedOptions()
        check_device(device)
        with weights_fit(device):
            self._hosted = HostedModel(model_path, device, dtype, options)
        self._load_seconds = time.perf_counter() - started
        self._device, self._dtype, self._block_size = device, dtype, sizes.block_size
        self._lora = LoraPool(self._hosted.model)
        self.host_adapters = self._lora.host
        self._slots = Slots.empty(sizes.max_running, max_blocks=0)
        self._pooling: list[Pooling] = [""] * sizes.max_running
        self._hidden_sums: dict[int, Tensor] = {}  # slot -> [hidden_size] float32, of the tokens computed so far
        # One column more: a row that runs one step beyond its end samples a token nobody reads.
        self._tokens = torch.zeros(sizes.max_running, sizes.max_total_tokens + 1, dtype=torch.int32, device=device)
        self._prompts = PromptLogprobs()
        self.grammars = GrammarMasks(model_path, options.trust_remote_code)
        self._sampling = SlotSampling(self._tokens, self.grammars)
        self._batches: list[PaddedBatch] = []  # each slot that has computed tokens is a row of exactly one
        self._block_users: dict[int, tuple[int, int]] = {}  # block id -> the slot it was last given to, and its admission
        self._num_admissions = [0] * sizes.max_running

    def report(self, memory_fraction: float) -> LoadReport:
        return LoadReport(
            device=torch.cuda.get_device_name(self._device) if self._device.type == "cuda" else "cpu",
            dtype=str(self._dtype).removeprefix("torch."),
            attention=f"transformers {self._hosted.attention}",
            weight_bytes=self._hosted.model.get_memory_footprint(),
            load_seconds=self._load_seconds,
            block_bytes=self._hosted.token_bytes * self._block_size,
            page_bytes=self._lora.page_bytes,
            free_bytes=free_bytes(self._device, memory_fraction),
            has_blocks=False,
            lora_shapes=self._lora.shapes,
        )

    @torch.inference_mode()
    def allocate(self, num_blocks: int, num_pages: int) -> int:
        """Padded batches grow as they need. Between steps a row of n tokens holds less than 2n columns, or at most 256 where n is less:
        at worst twice what the driver's blocks stand for, beyond those 256. A forward holds what it extends twice, old and new."""
        if not fits(partial(self._lora.allocate, num_pages)):
            raise MemoryError(f"there is no room for {num_pages} rank pages of {self._lora.page_bytes} bytes; lower adapters.gpu_bytes")
        return num_blocks

    def waits_for(self, step: Step) -> bool:
        return True

    def launch(self, step: Step) -> Launched:
        result = self.execute(step)
        return Launched(lambda: result, lambda: True)

    @torch.inference_mode()
    def execute(self, step: Step) -> StepResult:
        failed_loads = self._lora.load_all(step.loads, step.freed_pages)
        self._sampling.admit(step.admissions)
        for admission in step.admissions:
            self._admit(admission)
        self._drop(self._without_blocks(step.rows))
        sampled: list[tuple[int, Tensor]] = []  # slot and its logits [vocab_size]
        embeddings: dict[int, list[float]] = {}  # by slot
        for row in (row for row in step.rows if row.slot in self._prompts):
            last = self._score_prompt(row)
            sampled += [(row.slot, last)] * row.samples
        for group in self._groups([row for row in step.rows if row.slot not in self._prompts]):
            if self._pooling[group[0].slot]:
                embeddings.update(self._embed(group))
            else:
                logits = self._forward(group, self._hosted.logits)[0]
                sampled += [(row.slot, logits[i]) for i, row in enumerate(group) if row.samples]
        slots = [row.slot for row in step.rows if row.samples and not self._pooling[row.slot]]
        found = self._sample(slots, dict(sampled))
        prompts = dict(self._prompts.take(slots))
        return StepResult(
            step.step_id,
            found.token_ids,
            found.logprobs,
            failed_loads,
            [embeddings[row.slot] for row in step.rows if row.slot in embeddings],
            self._lora.load_time.seconds(),
            failed_rows=self._sampling.failed(step.rows),
            alternatives=found.alternatives,
            prompt_logprobs={place: scores.logprobs for place, scores in prompts.items()},
            prompt_alternatives={place: alternatives for place, scores in prompts.items() if (alternatives := scores.alternatives)},
        )

    def _admit(self, admission: Admission) -> None:
        assert admission.num_computed == 0, "a prefix is cached in blocks, and this rank has none"
        slot = admission.slot
        self._drop({slot})
        self._lora.wait(admission.page_ids)
        self._slots.admit(admission)
        self._prompts.admit(admission)
        self._pooling[slot] = admission.pooling
        self._num_admissions[slot] += 1
        token_ids = torch.tensor(admission.token_ids, dtype=torch.int32)
        self._tokens[slot, : len(token_ids)] = token_ids.to(self._device, non_blocking=True)

    def _without_blocks(self, rows: list[Row]) -> set[int]:
        """Slots whose blocks the driver has now given to another: it will not come back to them, though it never says so."""
        dead = set()
        for row in rows:
            for block in row.new_block_ids:
                slot, admission = self._block_users.get(block, (row.slot, 0))
                if slot != row.slot and admission == self._num_admissions[slot]:
                    dead.add(slot)
                self._block_users[block] = (row.slot, self._num_admissions[row.slot])
        return dead

    def _drop(self, slots: set[int]) -> None:
        """Forget what these slots have computed."""
        self._leave(slots)
        for slot in slots:
            self._hidden_sums.pop(slot, None)

    def _leave(self, slots: set[int]) -> None:
        rows = [[i for i, slot in enumerate(batch.slots) if slot not in slots] for batch in self._batches]
        self._batches = [batch.filter(keep) for batch, keep in zip(self._batches, rows, strict=True) if keep]

    def _take(self, slots: list[int]) -> PaddedBatch:
        """One batch of these slots, in this order; they leave those in which they were."""
        rows = [[i for i, slot in enumerate(batch.slots) if slot in slots] for batch in self._batches]
        taken = PaddedBatch.concatenate([batch.filter(keep) for batch, keep in zip(self._batches, rows, strict=True) if keep])
        self._leave(set(slots))
        return taken.filter([taken.slots.index(slot) for slot in slots])

    def _groups(self, rows: list[Row]) -> list[list[Row]]:
        """Rows of one padded forward, whose contexts round to the same power of two, and who rest together after it. A row's tokens must
        be neighbours in it, so rows with a past need equally many new ones. Within a group ordered by adapter."""
        groups: dict[tuple[bool, int, int], list[Row]] = {}
        for row in rows:
            num_computed = int(self._slots.num_computed[row.slot])
            smallest = SMALLEST_CONTEXT if num_computed else 1  # the padding of a first chunk is computed too
            context = (max(num_computed + row.num_tokens, smallest) - 1).bit_length()
            groups.setdefault((self._pooling[row.slot] != "", row.num_tokens if num_computed else 0, context), []).append(row)
        return [sorted(group, key=lambda row: (sort_key(self._slots.runs[row.slot]), row.slot)) for group in groups.values()]

    def _forward(self, group: list[Row], compute: Compute) -> tuple[Tensor, Tensor]:
        """What compute answers for the group's next tokens, and which of its columns are tokens: [rows, columns] bool, on the host."""
        slots, num_tokens = [row.slot for row in group], np.array([row.num_tokens for row in group])
        starts, length = self._slots.num_computed[slots], int(num_tokens.max())
        past = self._take(slots) if starts[0] else None
        assert past is None or past.num_tokens == starts.tolist(), "a row goes on where its slot was left"
        places = np.arange(length) - (
            length - num_tokens[:, None]
        )  # [rows, length] of the new tokens among their row's, negative = padding
        is_real = torch.from_numpy(places >= 0)
        places = np.maximum(places, 0) + (np.array(slots) * self._tokens.shape[1] + starts)[:, None]
        input_ids = self._tokens.view(-1)[self._upload(places)].long().masked_fill_(~is_real.to(self._device), self._hosted.pad_id)
        runs = [self._slots.runs[slot] for slot in slots]
        self._hosted.rows.num_tokens = input_ids.numel()
        self._hosted.rows.lora_work = lora_work(runs, [length] * len(group), self._upload, self._device, self._dtype)
        self._hosted.rows.specials = tuple(special_rows(runs, [length] * len(group), [False] * len(group), self._lora.specials))
        output, batch = compute(slots, input_ids, is_real, past)
        self._batches.append(batch)
        self._slots.num_computed[slots] += num_tokens
        return output, is_real

    def _score_prompt(self, row: Row) -> Tensor:
        """The logits of its last token, [vocab_size]."""
        for start in range(0, row.num_tokens, MAX_PIECE):
            piece = Row(row.slot, min(MAX_PIECE, row.num_tokens - start), [], samples=False)
            logits = self._forward([piece], self._hosted.all_logits)[0][0]  # [columns, vocab_size]
            self._prompts.add(row.slot, logits)
        return logits[-1]

    def _sample(self, slots: list[int], logits: dict[int, Tensor]) -> Sampled:
        """The slots' next tokens, in this order. logits: by slot, [vocab_size]."""
        if not slots:
            return Sampled([], [], {})
        places = np.array(slots)
        return self._sampling.fetch(
            self._sampling.sample(torch.stack([logits[slot] for slot in slots]), places, self._slots.num_computed[places])
        )

    def _embed(self, group: list[Row]) -> dict[int, list[float]]:
        """Slot -> embedding, of the rows that end one."""
        hidden, is_real = self._forward(group, self._hosted.hidden)
        sums = hidden.float().masked_fill(~is_real[:, :, None].to(self._device), 0).sum(1)  # [rows, hidden_size]
        embeddings = {}
        for i, row in enumerate(group):
            if self._pooling[row.slot] == "mean":
                self._hidden_sums[row.slot] = sums[i] + self._hidden_sums.pop(row.slot, 0)
            if row.samples:
                is_mean = self._pooling[row.slot] == "mean"
                pooled = self._hidden_sums.pop(row.slot) / self._slots.num_computed[row.slot] if is_mean else hidden[i, -1].float()
                embeddings[row.slot] = pooled.tolist()
        return embeddings

    def _upload(self, values: Ints) -> Tensor:
        return upload(values, self._device)
