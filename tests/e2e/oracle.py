"""What transformers and PEFT say about tokens the server made."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from loray.kernels.noise import gumbel_noise
from loray.models.sampler import noise_keys

ROUNDING = 1e-4


class Oracle:
    """By induction, if every token is the argmax after those before it, the whole is the greedy generation."""

    def __init__(self, model: Path, adapters: dict[str, Path]) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(model)
        self._base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
        self._model = self._base
        for name, folder in adapters.items():
            if isinstance(self._model, PeftModel):
                self._model.load_adapter(folder, name)
            else:
                self._model = PeftModel.from_pretrained(self._base, folder, name).eval()

    def add_weighted(self, names: list[str], weights: list[float], merged: str, **settings: Any) -> None:
        """One more adapter, merged by PEFT."""
        assert isinstance(self._model, PeftModel)
        self._model.add_weighted_adapter(names, weights, merged, **settings)

    @torch.inference_mode()
    def logits(self, adapter_id: str, token_ids: list[int]) -> torch.Tensor:
        ids = torch.tensor([token_ids])
        if not isinstance(self._model, PeftModel):
            return self._model(input_ids=ids).logits[0]
        if not adapter_id:
            with self._model.disable_adapter():
                return self._model(input_ids=ids).logits[0]
        self._model.set_adapter(adapter_id)
        return self._model(input_ids=ids).logits[0]

    def greedy(self, adapter_id: str, prompt_ids: list[int], num_new: int) -> list[int]:
        """Whatever comes, an end too."""
        token_ids = list(prompt_ids)
        for _ in range(num_new):
            token_ids.append(int(self.logits(adapter_id, token_ids)[-1].argmax()))
        return token_ids[len(prompt_ids) :]

    def assert_greedy(self, adapter_id: str, prompt_ids: list[int], output_ids: list[int]) -> None:
        """Two tokens whose logits differ by less than float32 rounding are equally greedy."""
        assert_best(self.logits(adapter_id, prompt_ids + output_ids)[len(prompt_ids) - 1 : -1], output_ids, ROUNDING)

    def assert_sampled(self, adapter_id: str, prompt_ids: list[int], output_ids: list[int], temperature: float, seed: int) -> None:
        """Each token is the best of logits / temperature + the noise of its seed and position."""
        logits = self.logits(adapter_id, prompt_ids + output_ids)[len(prompt_ids) - 1 : -1]
        positions = np.arange(len(prompt_ids), len(prompt_ids) + len(output_ids))
        keys = torch.from_numpy(noise_keys(np.full(len(output_ids), seed, np.uint64), positions))
        assert_best(logits / temperature + gumbel_noise(keys, logits.shape[1]), output_ids, ROUNDING / temperature)


def assert_best(scores: torch.Tensor, token_ids: list[int], tolerance: float) -> None:
    missing = scores.max(-1).values - scores.gather(1, torch.tensor(token_ids)[:, None])[:, 0]
    worst = int(missing.argmax())
    assert missing[worst] < tolerance, f"token {worst} of {token_ids} misses the best by {missing[worst]}"
