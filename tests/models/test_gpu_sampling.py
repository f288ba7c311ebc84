"""Everything of sampling gives the same tokens on a GPU as on the CPU."""

from pathlib import Path

import pytest
import torch

from tests.models.conductor import Conductor
from tests.models.sampling_jobs import mixed_requests, save_model

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")]


def test_grammars_penalties_watermark_and_logprobs_are_the_same_on_both_devices(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model")
    outputs = [Conductor(folder, device=device).play(mixed_requests(), chunk=7, stagger=1) for device in ("cpu", "cuda")]
    for expected, found in zip(*outputs, strict=True):
        assert found.token_ids == expected.token_ids and not found.failures
        assert found.logprobs == pytest.approx(expected.logprobs, abs=1e-3)
        assert found.prompt_logprobs == pytest.approx(expected.prompt_logprobs, abs=1e-3)
