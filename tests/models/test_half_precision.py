"""Every family in the half-precision dtypes that a GPU serves: near float32, with and without an adapter."""

from pathlib import Path

import pytest
import torch

from tests.models.conductor import Conductor, Request, prompt_of
from tests.models.families import FAMILIES, Adapter, config_of, random_model, save_adapter


@pytest.mark.parametrize("name", FAMILIES)
def test_half_precision_stays_near_float32(tmp_path: Path, name: str) -> None:
    family = FAMILIES[name]
    random_model(config_of(family), family.norm_center).save_pretrained(tmp_path / "base")
    adapter = save_adapter(tmp_path / "base", tmp_path / "adapter", Adapter(8))
    logprobs = {}
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        conductor = Conductor(tmp_path / "base", dtype=dtype)
        conductor.load(adapter, [3])
        requests = [Request(prompt_of(20), num_new=1), Request(prompt_of(9, seed=1), [3], num_new=1)]
        logprobs[dtype] = [output.logprobs[0] for output in conductor.play(requests, chunk=7, stagger=1)]
    assert logprobs[torch.bfloat16] == pytest.approx(logprobs[torch.float32], abs=0.1)
    assert logprobs[torch.float16] == pytest.approx(logprobs[torch.float32], abs=0.02)
