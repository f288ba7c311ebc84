"""Whether the tokens that a server gave are those of transformers and PEFT. By induction: each is the best after those before it."""

import random
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.adapters_server import Served
from benchmarks.adapters_traffic import Wish

ROUNDING = 1e-3  # logits that are closer than this are equally good


def check_tokens(served: Served, root: Path, wishes: Iterable[Wish], outputs: Mapping[int, list[int]], seconds: float) -> dict[str, Any]:
    """Adapter after adapter, in an order of no meaning, with all its requests, for so many seconds."""
    checker = _Checker(served, root)
    by_adapter: dict[str, list[Wish]] = defaultdict(list)
    for wish in wishes:
        by_adapter[wish.adapter_id].append(wish)
    names = sorted(by_adapter)
    random.Random(0).shuffle(names)
    deadline = time.monotonic() + seconds
    num_adapters = num_requests = num_wrong = num_like_base = 0
    for name in names:
        if time.monotonic() > deadline:
            break
        for wish in by_adapter[name]:
            is_right, is_like_base = checker.check(wish, outputs[wish.number])
            num_requests, num_wrong, num_like_base = num_requests + 1, num_wrong + (not is_right), num_like_base + is_like_base
        checker.forget(name)
        num_adapters += 1
    return {
        "compared with PEFT": num_requests,
        "of adapters": num_adapters,
        "wrong": num_wrong,
        "that the base model would give too": num_like_base,
    }


class _Checker:
    def __init__(self, served: Served, root: Path) -> None:
        self._root = root
        self._tokenizer = AutoTokenizer.from_pretrained(served.model)
        self._base = AutoModelForCausalLM.from_pretrained(served.model, dtype=torch.float32).to(served.device).eval()
        self._model: PeftModel | None = None

    def check(self, wish: Wish, output_ids: list[int]) -> tuple[bool, bool]:
        """Whether the adapter's model gives these tokens, and whether the base model does."""
        parameters = wish.body["parameters"]
        prompt_ids = self._tokenizer(wish.body["inputs"])["input_ids"][-parameters["truncate"] :]
        model = self._with(wish.adapter_id)
        if not _is_best(model, prompt_ids, output_ids):
            return False, False
        with model.disable_adapter():
            return True, _is_best(model, prompt_ids, output_ids)

    def forget(self, name: str) -> None:
        if self._model is not None and len(self._model.peft_config) > 1:
            self._model.delete_adapter(name)

    def _with(self, name: str) -> PeftModel:
        if self._model is None:
            self._model = PeftModel.from_pretrained(self._base, self._root / name, name).eval()
        elif name not in self._model.peft_config:
            self._model.load_adapter(self._root / name, name)
        self._model.set_adapter(name)
        return self._model


@torch.inference_mode()
def _is_best(model: PeftModel, prompt_ids: list[int], output_ids: list[int]) -> bool:
    ids = torch.tensor([prompt_ids + output_ids], device=model.device)
    scores = model(input_ids=ids).logits[0, len(prompt_ids) - 1 : -1]
    missing = scores.max(-1).values - scores.gather(1, ids[0, len(prompt_ids) :, None])[:, 0]
    return bool((missing < ROUNDING).all())
