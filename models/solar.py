"""Solar's configuration, which transformers does not have: Llama's, and where its block skip connections lie."""

from typing import Any

from transformers import LlamaConfig


class SolarConfig(LlamaConfig):
    model_type = "solar"

    def __init__(self, **settings: Any) -> None:
        self.bskcn_1: list[int] = settings.pop("bskcn_1", None) or []  # layers before which the hidden state is kept, first place
        self.bskcn_2: list[int] = settings.pop("bskcn_2", None) or []  # and second place
        self.bskcn_3: list[int] = settings.pop("bskcn_3", None) or []  # layers before which the first is mixed in again
        self.bskcn_4: list[int] = settings.pop("bskcn_4", None) or []  # and the second
        self.bskcn_tv: list[float] = settings.pop("bskcn_tv", None) or [1.0, 1.0]  # weight of what was kept: in training, in use
        super().__init__(**settings)
