"""Every family in the half-precision dtypes that a GPU serves, and from checkpoints in float16, which a CPU keeps so."""

from pathlib import Path

import pytest
import torch

from loray.kernels import native
from loray.kernels.half_linear import HAS_HALF_LINEAR, HalfMatrix
from loray.kernels.native_linear import NativeMatrix
from tests.kernels.triton_marks import REAL_GPU
from tests.models.conductor import Conductor, Request, prompt_of
from tests.models.families import FAMILIES, Adapter, base_oracle, config_of, random_model, save_adapter
from tests.models.tiny_llama import oracle_generate

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=REAL_GPU)])
@pytest.mark.parametrize("name", FAMILIES)
def test_half_precision_stays_near_float32(tmp_path: Path, name: str, device: str) -> None:
    family = FAMILIES[name]
    random_model(config_of(family), family.norm_center).save_pretrained(tmp_path / "base")
    adapter = save_adapter(tmp_path / "base", tmp_path / "adapter", Adapter(8))
    logprobs = {}
    for place, dtype in (("cpu", torch.float32), (device, torch.bfloat16), (device, torch.float16)):
        conductor = Conductor(tmp_path / "base", device=place, dtype=dtype)
        conductor.load(adapter, [3])
        requests = [Request(prompt_of(20), num_new=1), Request(prompt_of(9, seed=1), [3], num_new=1)]
        logprobs[dtype] = [output.logprobs[0] for output in conductor.play(requests, chunk=7, stagger=1)]
    assert logprobs[torch.bfloat16] == pytest.approx(logprobs[torch.float32], abs=0.1)
    assert logprobs[torch.float16] == pytest.approx(logprobs[torch.float32], abs=0.02)


@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_float16_checkpoint_is_served_in_float32_with_transformers_numbers(tmp_path: Path, name: str, is_tied: bool) -> None:
    family = FAMILIES[name]
    random_model(config_of(family, tie_word_embeddings=is_tied), family.norm_center, family.seed).half().save_pretrained(tmp_path)
    prompt = prompt_of(20)
    conductor = Conductor(tmp_path)
    tokens, logprobs = oracle_generate(base_oracle(tmp_path), prompt)
    output = conductor.generate(prompt)
    assert output.token_ids == tokens
    assert output.logprobs == pytest.approx(logprobs, abs=1e-4)
    linear = next(iter(conductor.runner._lora._linears.values()))
    assert isinstance(linear._packed, NativeMatrix) == native.has_linear()
    assert isinstance(linear._packed, HalfMatrix) == (HAS_HALF_LINEAR and not native.has_linear())
    assert linear.weight.numel() == (0 if linear._packed is not None else linear.in_size * linear.out_size)
