"""What transformers and PEFT say about tokens the server made."""

from pathlib import Path

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

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

    def assert_greedy(self, adapter_id: str, prompt_ids: list[int], output_ids: list[int]) -> None:
        """Two tokens whose logits differ by less than float32 rounding are equally greedy."""
        logits = self.logits(adapter_id, prompt_ids + output_ids)[len(prompt_ids) - 1 : -1]
        missing = logits.max(-1).values - logits.gather(1, torch.tensor(output_ids)[:, None])[:, 0]
        worst = int(missing.argmax())
        assert missing[worst] < ROUNDING, f"adapter {adapter_id!r}: token {worst} of {output_ids} misses the best by {missing[worst]}"
