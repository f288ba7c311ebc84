"""Brings a step's layout to the device as a Batch. Decides nothing: the order is layout.py's."""

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from loray.models.attention_groups import GroupPlanner
from loray.models.batch import Batch
from loray.models.layout import Layout
from loray.models.lora_groups import lora_work, special_rows
from loray.models.paged_table import PagedTable
from loray.models.special import Special
from loray.models.to_device import upload


class Planner:
    def __init__(self, tokens: Tensor, attention: GroupPlanner | PagedTable, specials: Mapping[int, Special], dtype: torch.dtype) -> None:
        self._tokens = tokens  # [max_running, columns] int32, on the device
        self._attention = attention
        self._specials = specials  # by first page
        self._dtype = dtype

    def batch(self, layout: Layout) -> Batch:
        num_tokens = layout.num_tokens.tolist()
        places = layout.token_slots * self._tokens.shape[1] + layout.positions
        token_places, positions, kv_slots = self._upload(np.stack((places, layout.positions, layout.kv_slots)))
        return Batch(
            input_ids=self._tokens.view(-1)[token_places],
            positions=positions,
            kv_slots=kv_slots,
            attention=self._attention.plan(layout),
            lora_work=lora_work(layout.runs, num_tokens, self._upload, self._tokens.device, self._dtype),
            specials=tuple(special_rows(layout.runs, num_tokens, layout.samples.tolist(), self._specials)),
            sample_tokens=None if layout.is_decode else self._upload(layout.sample_tokens),
        )

    def _upload(self, values: NDArray[np.int64]) -> Tensor:
        return upload(values, self._tokens.device)
