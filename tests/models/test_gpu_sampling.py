"""Everything of sampling gives the same tokens on a GPU as on the CPU."""

from pathlib import Path

import pytest
import torch

from loray.models.launched import Launched
from loray.models.step import Step
from tests.models.conductor import Conductor, Request, pipelined, prompt_of
from tests.models.sampling_jobs import LARGE_VOCAB_SIZE, PLAIN, mixed_requests, save_model
from tests.models.tiny_llama import save_llama

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")]


def test_grammars_penalties_watermark_and_logprobs_are_the_same_on_both_devices(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model")
    outputs = [Conductor(folder, device=device).play(mixed_requests(), chunk=7, stagger=1) for device in ("cpu", "cuda")]
    for expected, found in zip(*outputs, strict=True):
        assert found.token_ids == expected.token_ids and not found.failures
        assert found.logprobs == pytest.approx(expected.logprobs, abs=1e-3)
        assert found.prompt_logprobs == pytest.approx(expected.prompt_logprobs, abs=1e-3)


def test_no_launch_of_decodes_waits_for_the_gpu_whatever_is_plainly_sampled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save_llama(tmp_path, vocab_size=LARGE_VOCAB_SIZE)
    requests = [Request(prompt_of(5 + i, i, LARGE_VOCAB_SIZE), sampling=sampling) for i, sampling in enumerate(PLAIN)]
    expected = [output.token_ids for output in Conductor(folder).play(requests)]
    conductor = Conductor(folder, device="cuda")
    conductor.play(requests)  # what is made or compiled at its first use is there
    launch, num_watched = conductor.runner.launch, 0

    def watched(step: Step) -> Launched:
        nonlocal num_watched
        assert not conductor.runner.waits_for(step)
        if step.admissions:
            return launch(step)
        num_watched += 1
        torch.cuda.set_sync_debug_mode("error")
        try:
            return launch(step)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    monkeypatch.setattr(conductor.runner, "launch", watched)
    assert pipelined(conductor, requests, num_new=8) == expected
    assert num_watched == 7
