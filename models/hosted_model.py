"""A causal language model that transformers runs: loaded, tried once, then called on padded batches. Knows no slots, steps or sampling."""

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from inspect import signature
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

from loray.models.hosted_linear import ForwardRows, SeenTokens, host_lora
from loray.models.loader import WeightsError
from loray.models.padded_batch import PaddedBatch

TRIAL_MASK = torch.tensor([[False, False, True, True, True], [True, True, True, True, True]])
MAX_NAMED = 5  # tensors in an error message


@dataclass(frozen=True, slots=True)
class HostedOptions:
    trust_remote_code: bool = False  # whether code that comes with a checkpoint may run
    quantization: str | None = None  # "bitsandbytes-8bit"


class HostedModel:
    def __init__(self, folder: Path, device: torch.device, dtype: torch.dtype, options: HostedOptions) -> None:
        self._device = device
        self.model = _load(folder, device, dtype, options)
        self.rows = ForwardRows()
        parameters = signature(self.model.forward).parameters
        if "past_key_values" not in parameters:
            raise ValueError(f"{type(self.model).__name__} does not keep the keys and values of each token: cannot be served")
        self._takes_positions = "position_ids" in parameters  # models with ALiBi read distances off the mask instead
        self._last_only = {"logits_to_keep": 1} if "logits_to_keep" in parameters else {}
        self.pad_id = pad_token_id(_tokenizer(folder, options), self.model.config, self.model.get_input_embeddings().weight.shape[0])
        with torch.inference_mode():
            self._makes_tuples = self._is_transposed = False
            self._try(dtype)

    @property
    def attention(self) -> str:
        return str(self.model.config._attn_implementation)

    def logits(self, slots: Sequence[int], input_ids: Tensor, mask: Tensor, past: PaddedBatch | None) -> tuple[Tensor, PaddedBatch]:
        """Of each row's last token, [rows, vocab_size]. input_ids, mask: [rows, new columns], after those of past."""
        whole_mask = mask if past is None else torch.cat([past.attention_mask, mask], 1)
        output = self.model(**self._inputs(input_ids, whole_mask, past), **self._last_only)
        return output.logits[:, -1], self._batch(slots, whole_mask, output.past_key_values)

    def hidden(self, slots: Sequence[int], input_ids: Tensor, mask: Tensor, past: PaddedBatch | None) -> tuple[Tensor, PaddedBatch]:
        """What the output head would see, [rows, new columns, hidden_size]."""
        whole_mask = mask if past is None else torch.cat([past.attention_mask, mask], 1)
        output = self.model.base_model(**self._inputs(input_ids, whole_mask, past))
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

    def _try(self, dtype: torch.dtype) -> None:
        """Runs two rows, and learns how the model keeps its keys and values, how large they are, and which linears can carry LoRA."""
        seen = SeenTokens(self.model, self.model.get_output_embeddings())
        num_rows, length = TRIAL_MASK.shape
        input_ids = torch.zeros(num_rows, length, dtype=torch.long, device=self._device)
        inputs = self._inputs(input_ids, TRIAL_MASK, None)
        past = self.model(**{**inputs, "past_key_values": None}).past_key_values
        host_lora(seen.close(num_rows, length), dtype, self.rows)
        self._makes_tuples = isinstance(past, tuple)
        if not self._makes_tuples and not _keeps_keys(past):
            kept = ", ".join(sorted({type(layer).__name__ for layer in getattr(past, "layers", [])})) or "nothing"
            raise ValueError(f"{type(self.model).__name__} keeps {kept}, not just the keys and values of each token: cannot be served")
        self._is_transposed = self._makes_tuples and past[0][0].ndim == 3
        batch = self.logits(range(num_rows), input_ids, TRIAL_MASK, None)[1]
        for keys, values in batch.layers:
            found = (keys.shape[-1 if self._is_transposed else -2], values.shape[-2], keys.shape[0] % num_rows, values.shape[0] % num_rows)
            if found != (length, length, 0, 0):
                raise ValueError(
                    f"{type(self.model).__name__} keeps keys {tuple(keys.shape)} and values {tuple(values.shape)}: cannot be served"
                )
        self.token_bytes = sum(part.nbytes for layer in batch.layers for part in layer) // (num_rows * length)


def _keeps_keys(past: Any) -> bool:
    layers = getattr(past, "layers", [])
    return (
        type(past) is DynamicCache and len(layers) > 0 and all(type(layer) in (DynamicLayer, DynamicSlidingWindowLayer) for layer in layers)
    )


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
