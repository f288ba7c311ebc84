"""Float16 and bfloat16, with adapters: the log-probabilities that transformers and PEFT have for the same tokens in float32."""

from pathlib import Path

import pytest
import torch

from loray.kernels import varlen_attention
from tests.kernels.triton_marks import REAL_GPU
from tests.models import tiny_llama
from tests.models.conductor import Conductor, Request, prompt_of

pytestmark = REAL_GPU
WIDE = {
    "hidden_size": 256,
    "intermediate_size": 1408,
    "num_attention_heads": 8,
    "initializer_range": 0.05,
}  # gate and up: one wave of programs
PAGES = {0: [], 4: [9], 12: [7, 3], 64: [20, 21, 22, 10, 24, 25, 27, 26]}
MEAN_ERROR = {torch.float16: 0.004, torch.bfloat16: 0.03}


@torch.inference_mode()
def logprobs_of(model: torch.nn.Module, prompt: list[int], output: list[int]) -> torch.Tensor:
    scores = model(input_ids=torch.tensor([prompt + output])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
    return scores.gather(1, torch.tensor(output)[:, None])[:, 0]


@pytest.mark.parametrize("dtype", MEAN_ERROR, ids=str)
def test_decodes_with_adapters_stay_within_the_rounding_of_their_dtype(
    dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from loray.kernels import linear_triton  # needs Triton

    base = tiny_llama.save_llama(tmp_path / "base", **WIDE)
    ranks = [rank for rank in PAGES if rank]
    folders = {rank: tiny_llama.save_adapter(base, tmp_path / f"r{rank}", rank, std=0.05, r=rank, lora_alpha=2 * rank) for rank in ranks}
    products, real = [], linear_triton.linear
    monkeypatch.setattr(linear_triton, "linear", lambda *inputs: (products.append(inputs[1].shape), real(*inputs))[1])
    conductor = Conductor(base, device="cuda", dtype=dtype)
    for rank, folder in folders.items():
        conductor.load(folder, PAGES[rank])
    requests = [Request(prompt_of(5 + 9 * i, seed=i), PAGES[rank], num_new=32) for i, rank in enumerate((*PAGES, *PAGES))]
    found = conductor.play(requests, chunk=10, stagger=1)
    assert (2816, 256) in products
    for rank, request, output in zip((*PAGES, *PAGES), requests, found, strict=True):
        logprobs = torch.tensor(output.logprobs)
        wanted = logprobs_of(tiny_llama.oracle(base, folders.get(rank)), request.prompt, output.token_ids)
        assert (logprobs - wanted).abs().mean() < MEAN_ERROR[dtype]
        if rank:
            assert (logprobs - logprobs_of(tiny_llama.oracle(base), request.prompt, output.token_ids)).abs().mean() > 10 * MEAN_ERROR[dtype]


@pytest.mark.parametrize("has_flash_attn", [True, False])
@pytest.mark.parametrize("dtype", MEAN_ERROR, ids=str)
def test_long_prompts_stay_within_the_rounding_of_their_dtype_whichever_library_attends(
    dtype: torch.dtype, has_flash_attn: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not has_flash_attn:
        monkeypatch.setattr(varlen_attention, "_flash_attn", lambda: None)
    varlen_attention.backend.cache_clear()
    base = tiny_llama.save_llama(tmp_path / "base", **WIDE)
    folder = tiny_llama.save_adapter(base, tmp_path / "r12", 12, std=0.05, r=12, lora_alpha=24)
    conductor = Conductor(base, device="cuda", dtype=dtype, max_total_tokens=700)
    conductor.load(folder, PAGES[12])
    requests = [Request(prompt_of(530 + 25 * i, seed=i), PAGES[12] if i % 2 else [], num_new=8) for i in range(4)]
    found = conductor.play(requests, chunk=600, stagger=1)
    varlen_attention.backend.cache_clear()
    for i, (request, output) in enumerate(zip(requests, found, strict=True)):
        wanted = logprobs_of(tiny_llama.oracle(base, folder if i % 2 else None), request.prompt, output.token_ids)
        assert (torch.tensor(output.logprobs) - wanted).abs().mean() < MEAN_ERROR[dtype]
