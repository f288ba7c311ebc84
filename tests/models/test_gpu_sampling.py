"""Everything of sampling gives the same tokens on a GPU as on the CPU, and no launch waits for the GPU."""

from pathlib import Path

import pytest
import torch

from loray.models.launched import Launched
from loray.models.step import Step
from tests.kernels.triton_marks import REAL_GPU
from tests.models.conductor import Conductor, Request, pipelined, prompt_of
from tests.models.sampling_jobs import LARGE_VOCAB_SIZE, PLAIN, mixed_requests, save_model
from tests.models.tiny_llama import save_adapter, save_llama

pytestmark = REAL_GPU
LARGE_RANK, NUM_PAGES = 264, 48  # a rank that no graph has room for
PAGES = {4: [9], 12: [7, 3], 64: [0, 1, 2, 10, 4, 5, 6, 8], LARGE_RANK: list(range(12, 45))}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_llama(tmp_path_factory.mktemp("sampling") / "model", vocab_size=LARGE_VOCAB_SIZE)


@pytest.fixture(scope="module")
def all_adapters(adapters: dict[int, Path], model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    large = save_adapter(model, tmp_path_factory.mktemp("large"), std=0.05, r=LARGE_RANK, lora_alpha=LARGE_RANK)
    return {**adapters, LARGE_RANK: large}


def test_grammars_penalties_watermark_and_logprobs_are_the_same_on_both_devices(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model")
    outputs = [Conductor(folder, device=device).play(mixed_requests(), chunk=7, stagger=1) for device in ("cpu", "cuda")]
    for expected, found in zip(*outputs, strict=True):
        assert found.token_ids == expected.token_ids and not found.failures
        assert found.logprobs == pytest.approx(expected.logprobs, abs=1e-3)
        assert found.prompt_logprobs == pytest.approx(expected.prompt_logprobs, abs=1e-3)


def loaded(folder: Path, adapters: dict[int, Path], device: str, dtype: torch.dtype = torch.float32) -> Conductor:
    conductor = Conductor(folder, device=device, dtype=dtype, num_pages=NUM_PAGES)
    for rank, page_ids in PAGES.items():
        conductor.load(adapters[rank], page_ids)
    return conductor


def plain_requests(prompt_len: int, ranks: list[int]) -> list[Request]:
    """Of unequal lengths; the adapters take turns."""
    return [
        Request(prompt_of(prompt_len + i, i, LARGE_VOCAB_SIZE), PAGES.get(ranks[i % len(ranks)], []), sampling)
        for i, sampling in enumerate(PLAIN)
    ]


def watched_tokens(conductor: Conductor, requests: list[Request], monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Of eight steps, the first with the prompts. A launch that waits for the GPU fails."""
    conductor.play(requests)  # what is made or compiled at its first use is there
    launch, num_watched = conductor.runner.launch, 0

    def watched(step: Step) -> Launched:
        nonlocal num_watched
        assert not conductor.runner.waits_for(step)
        num_watched += 1
        torch.cuda.set_sync_debug_mode("error")
        try:
            return launch(step)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    monkeypatch.setattr(conductor.runner, "launch", watched)
    token_ids = pipelined(conductor, requests, num_new=8)
    assert num_watched == 8
    return token_ids


@pytest.mark.parametrize(
    ("prompt_len", "ranks"),
    [(5, [0]), (5, [0, 4, 12, 64]), (90, [0, 4, 12, 64]), (5, [0, 4, LARGE_RANK])],
    ids=["graphs", "graphs with LoRA", "prompts too large for a graph", "ranks too many for a graph"],
)
def test_no_launch_waits_for_the_gpu_whatever_is_plainly_sampled(
    model: Path, all_adapters: dict[int, Path], prompt_len: int, ranks: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = plain_requests(prompt_len, ranks)
    expected = [output.token_ids for output in loaded(model, all_adapters, "cpu").play(requests)]
    assert watched_tokens(loaded(model, all_adapters, "cuda"), requests, monkeypatch) == expected


def test_no_launch_waits_for_the_gpu_in_bfloat16_either(
    model: Path, all_adapters: dict[int, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whose prompts are attended by kernels of flash-attn's, or PyTorch's."""
    watched_tokens(loaded(model, all_adapters, "cuda", torch.bfloat16), plain_requests(90, [0, 4, 12, 64]), monkeypatch)
