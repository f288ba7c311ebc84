"""A causal language model that transformers runs: loaded, tried once, then called on padded batches. Knows no slots, steps or sampling."""

import importlib.util
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from inspect import signature
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    DynamicCache,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from loray.models.architectures import SERVED
from loray.models.hosted_linear import ForwardRows, SeenTokens, host_lora
from loray.models.loader import WeightsError
from loray.models.padded_batch import PaddedBatch

logger = logging.getLogger("loray.loader")

# The trial: two rows of random tokens, the first padded. Computed together: a first piece, a chunk, a single token; then each row goes on
# alone, by which the first has lost its padding.
TRIAL_PADDING = 16
TRIAL_ENDS = (19, 21, 22, 23, 24)  # columns of the pieces
TRIAL_TOGETHER = 22  # columns, in which the rows are together
# A row's logits may be this far (root mean square) from those of the plain model, in units of their standard deviation.
MAX_DISTANCE = {torch.float32: 1e-3}
MAX_HALF_DISTANCE = 0.1  # rounding alone; and a router may turn to another expert, hence one piece of a row may be further off
Compute = Callable[[Sequence[int], Tensor, Tensor, PaddedBatch | None], tuple[Tensor, PaddedBatch]]  # a forward of HostedModel
MAX_NAMED = 5  # tensors in an error message


@dataclass(frozen=True, slots=True)
class HostedOptions:
    trust_remote_code: bool = False  # whether code that comes with a checkpoint may run
    quantization: str | None = None  # "bitsandbytes-8bit"


class HostedModel:
    def __init__(self, folder: Path, device: torch.device, dtype: torch.dtype, options: HostedOptions) -> None:
        started = time.perf_counter()
        self._device = device
        self.model = _load(folder, device, dtype, options)
        num_tensors, num_bytes = len(list(self.model.parameters())), self.model.get_memory_footprint()
        logger.info("loaded %d tensors, %.2f GB, in %.1f s", num_tensors, num_bytes / 1e9, time.perf_counter() - started)
        self.rows = ForwardRows()
        parameters = signature(self.model.forward).parameters
        if "past_key_values" not in parameters:
            raise ValueError(f"{type(self.model).__name__} does not keep the keys and values of each token: cannot be served; {SERVED}")
        self._body = _body(self.model)
        self._takes_positions = "position_ids" in parameters  # models with ALiBi read distances off the mask instead
        self._last_only = {"logits_to_keep": 1} if "logits_to_keep" in parameters else {}
        self.pad_id = pad_token_id(_tokenizer(folder, options), self.model.config, self.model.get_input_embeddings().weight.shape[0])
        with torch.inference_mode():
            self._makes_tuples = self._is_transposed = False
            self._try(dtype, is_exact=options.quantization is None)

    @property
    def attention(self) -> str:
        return str(self.model.config._attn_implementation)

    def logits(self, slots: Sequence[int], input_ids: Tensor, mask: Tensor, past: PaddedBatch | None) -> tuple[Tensor, PaddedBatch]:
        """Of each row's last token, [rows, vocab_size]. input_ids, mask: [rows, new columns], after those of past."""
        whole_mask = mask if past is None else torch.cat([past.attention_mask, mask], 1)
        output = self.model(**self._inputs(input_ids, whole_mask, past), **self._last_only)
        return output.logits[:, -1], self._batch(slots, whole_mask, output.past_key_values)

    def all_logits(self, slots: Sequence[int], input_ids: Tensor, mask: Tensor, past: PaddedBatch | None) -> tuple[Tensor, PaddedBatch]:
        """Of every new token, [rows, new columns, vocab_size]."""
        whole_mask = mask if past is None else torch.cat([past.attention_mask, mask], 1)
        output = self.model(**self._inputs(input_ids, whole_mask, past))
        return output.logits, self._batch(slots, whole_mask, output.past_key_values)

    def hidden(self, slots: Sequence[int], input_ids: Tensor, mask: Tensor, past: PaddedBatch | None) -> tuple[Tensor, PaddedBatch]:
        """What the output head would see, [rows, new columns, hidden_size]."""
        whole_mask = mask if past is None else torch.cat([past.attention_mask, mask], 1)
        output = self._body(**self._inputs(input_ids, whole_mask, past))
        return output.last_hidden_state, self._batch(slots, whole_mask, output.past_key_values)

    def _inputs(self, input_ids: Tensor, mask: Tensor, past: PaddedBatch | None) -> dict[str, Any]:
        """mask: [rows, columns of past and new ones]"""
        inputs: dict[str, Any] = {
            "input_ids": input_ids,
            "attention_mask": mask.long().to(self._device, non_blocking=True),
            "use_cache": True,
        }
        inputs["past_key_values"] = self._past(past)
        if self._takes_positions:
            inputs["position_ids"] = (inputs["attention_mask"].cumsum(1) - 1).clamp_(min=0)[:, -input_ids.shape[1] :]
        return inputs

    def _past(self, past: PaddedBatch | None) -> Any:
        if self._makes_tuples:
            return None if past is None else past.layers
        cache = DynamicCache()  # without the config, layers with a sliding window keep everything too, and the mask hides it
        for keys, values in () if past is None else past.layers:
            layer = DynamicLayer()
            layer.lazy_initialization(keys, values)
            layer.keys, layer.values = keys, values
            cache.layers.append(layer)
        return cache

    def _batch(self, slots: Sequence[int], mask: Tensor, past: Any) -> PaddedBatch:
        layers = past if self._makes_tuples else ((layer.keys, layer.values) for layer in past.layers)
        return PaddedBatch(tuple(slots), mask, tuple((keys, values) for keys, values, *_ in layers), self._is_transposed)

    def _try(self, dtype: torch.dtype, is_exact: bool) -> None:
        """Runs two rows through the calls that will be made, and learns how the model keeps its keys and values, how large they are,
        and which linears can carry LoRA. Refuses a model whose rows do not get the numbers that they get alone."""
        input_ids = self._trial_tokens()  # [rows, columns]
        mask = torch.ones(input_ids.shape, dtype=torch.bool)
        mask[0, :TRIAL_PADDING] = False
        self._learn_cache(input_ids, mask)
        seen = SeenTokens(self.model, self.model.get_output_embeddings())
        self._in_pieces(self.hidden, input_ids[:, : TRIAL_ENDS[1]], mask, seen)
        found = self._in_pieces(self.logits, input_ids, mask, seen)  # [pieces, rows, vocab_size]
        host_lora(seen.close(), dtype, self.rows)
        if not is_exact:
            return
        columns = torch.tensor(TRIAL_ENDS) - 1
        plain = [self.model(input_ids=input_ids[1:]).logits[0, columns]]  # no positions, no mask, no past
        plain.insert(0, self.model(input_ids=input_ids[:1, TRIAL_PADDING:]).logits[0, columns - TRIAL_PADDING])
        alone = self.logits([0], input_ids[1:], mask[1:], None)[0]  # [1, vocab_size]
        pairs = [(found[:, 0], plain[0]), (torch.cat([found[:, 1], alone]), torch.cat([plain[1], plain[1][-1:]]))]
        if not all(_are_near(one, other, dtype) for one, other in pairs):
            raise ValueError(f"{type(self.model).__name__} gives other numbers in a padded batch than alone: cannot be served; {SERVED}")

    def _trial_tokens(self) -> Tensor:
        """[2, columns] random ids, none of them padding: some models count positions by what is not."""
        num_embeddings = self.model.get_input_embeddings().weight.shape[0]
        padding = {self.pad_id, getattr(self.model.config, "pad_token_id", None)}
        token_ids = [i for i in torch.randperm(num_embeddings, generator=torch.Generator().manual_seed(0)).tolist() if i not in padding]
        num_needed = 2 * TRIAL_ENDS[-1]
        input_ids = torch.tensor((token_ids * num_needed)[:num_needed], device=self._device).view(2, -1)
        input_ids[0, :TRIAL_PADDING] = self.pad_id
        return input_ids

    def _learn_cache(self, input_ids: Tensor, mask: Tensor) -> None:
        num_rows, length = input_ids.shape
        past = self.model(**{**self._inputs(input_ids, mask, None), "past_key_values": None}).past_key_values
        self._makes_tuples = isinstance(past, tuple)
        if not self._makes_tuples and (surplus := _surplus(past)):
            raise ValueError(
                f"{type(self.model).__name__} keeps {surplus}, not just the keys and values of each token: cannot be served; {SERVED}"
            )
        self._is_transposed = self._makes_tuples and past[0][0].ndim == 3
        batch = self.logits(range(num_rows), input_ids, mask, None)[1]  # past itself may have forgotten what a window hides
        for keys, values in batch.layers:
            found = (keys.shape[-1 if self._is_transposed else -2], values.shape[-2], keys.shape[0] % num_rows, values.shape[0] % num_rows)
            if found != (length, length, 0, 0):
                raise ValueError(
                    f"{type(self.model).__name__} keeps keys {tuple(keys.shape)} and values {tuple(values.shape)}: "
                    f"cannot be served; {SERVED}"
                )
        self.token_bytes = sum(part.nbytes for layer in batch.layers for part in layer) // (num_rows * length)

    def _in_pieces(self, compute: Compute, input_ids: Tensor, mask: Tensor, seen: SeenTokens) -> Tensor:
        """What compute answers for the last token of each piece, [pieces, rows, size]."""
        pasts: list[PaddedBatch | None] = [None]
        answers = []
        for start, end in pairwise(end for end in (0, *TRIAL_ENDS) if end <= input_ids.shape[1]):
            if start == TRIAL_TOGETHER:
                pasts = [past.filter([row]) for past in pasts if past for row in range(past.num_rows)]
            parts = []
            for i, past in enumerate(pasts):
                rows = past.slots if past else range(len(input_ids))
                part = slice(rows[0], rows[-1] + 1), slice(start, end)
                with seen.watch(len(rows), end - start):
                    answer, pasts[i] = compute(rows, input_ids[part], mask[part], past)
                parts.append(answer if answer.ndim == 2 else answer[:, -1])
            answers.append(torch.cat(parts))
        return torch.stack(answers)


def _body(model: PreTrainedModel) -> PreTrainedModel:
    """The part without the output head; Llama 4 gives it another name than it says."""
    parts = (model.base_model, *model.children())
    body = next((part for part in parts if isinstance(part, PreTrainedModel) and part is not model), None)
    if body is None:
        raise ValueError(f"{type(model).__name__} has no part that gives hidden states: cannot be served; {SERVED}")
    return body


def _are_near(found: Tensor, wanted: Tensor, dtype: torch.dtype) -> bool:
    """found, wanted: [pieces, vocab_size], of one row."""
    is_usable = wanted.isfinite()  # some models give tokens that never come minus infinity
    maximum = MAX_DISTANCE.get(dtype, MAX_HALF_DISTANCE)
    is_near = [
        bool((one[usable] - other[usable]).square().mean().sqrt() <= maximum * other[usable].std())
        for one, other, usable in zip(found.float(), wanted.float(), is_usable, strict=True)
    ]
    return all(is_near) if dtype in MAX_DISTANCE else is_near.count(False) <= 1


def _surplus(past: Any) -> str:
    """What a cache keeps besides plain layers of keys and values; "" = nothing."""
    layers = getattr(past, "layers", [])
    if not layers:
        return "nothing" if past is None else f"a cache of type {type(past).__name__}"
    odd = sorted({type(layer).__name__ for layer in layers} - {DynamicLayer.__name__, DynamicSlidingWindowLayer.__name__})
    return ", ".join(odd) or ("" if type(past) is DynamicCache else f"a cache of type {type(past).__name__}")


def _load(folder: Path, device: torch.device, dtype: torch.dtype, options: HostedOptions) -> PreTrainedModel:
    settings: dict[str, Any] = {"dtype": dtype, "trust_remote_code": options.trust_remote_code, "output_loading_info": True}
    if options.quantization is not None:
        if options.quantization != "bitsandbytes-8bit":
            raise ValueError(f"model.quantization {options.quantization!r} is unknown: only bitsandbytes-8bit can be served")
        if device.type != "cuda":
            raise ValueError(f"model.quantization bitsandbytes-8bit needs a GPU, and this rank runs on {device.type}")
        if importlib.util.find_spec("bitsandbytes") is None:
            raise ValueError("model.quantization bitsandbytes-8bit needs the package bitsandbytes: install loray with the extra `bnb`")
        settings |= {"quantization_config": BitsAndBytesConfig(load_in_8bit=True), "device_map": {"": device}}  # it moves itself
    model, found = AutoModelForCausalLM.from_pretrained(folder, **settings)
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if found[kind]:
            names = sorted(str(name) for name in found[kind])
            more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
            raise WeightsError(f"{folder.name}: {kind.removesuffix('_keys')} tensors: {', '.join(names[:MAX_NAMED])}{more}")
    placed = model if options.quantization else model.to(device)
    return placed.eval().requires_grad_(False)


def _tokenizer(folder: Path, options: HostedOptions) -> PreTrainedTokenizerBase | None:
    """None where the checkpoint brings none."""
    if not (folder / "tokenizer_config.json").exists():
        return None
    return AutoTokenizer.from_pretrained(folder, trust_remote_code=options.trust_remote_code)


def pad_token_id(tokenizer: PreTrainedTokenizerBase | None, config: PretrainedConfig, num_embeddings: int) -> int:
    """The first of these that has an embedding: the tokenizer's padding token, the config's, the config's end of sequence, the
    tokenizer's, an added [PAD], 0. Padding is masked, so nothing but the embedding is asked of it."""
    eos = getattr(config, "eos_token_id", None)
    candidates = [
        getattr(tokenizer, "pad_token_id", None),
        getattr(config, "pad_token_id", None),
        *(eos if isinstance(eos, list) else [eos]),
        getattr(tokenizer, "eos_token_id", None),
    ]
    found = next((token_id for token_id in candidates if token_id is not None and 0 <= token_id < num_embeddings), None)
    if found is None and tokenizer is not None:
        tokenizer.add_special_tokens({"pad_token": "[PAD]"})
        found = tokenizer.pad_token_id if tokenizer.pad_token_id < num_embeddings else None
    return 0 if found is None else int(found)
