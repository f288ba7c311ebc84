"""A rank in this process: what it makes of its spec."""

import logging
from pathlib import Path

import pytest
import torch

from loray.cluster.rank import Rank, RankSpec
from loray.kernels.float8_linear import Float8Matrix
from loray.models import compiled_grammars
from loray.models.linear import Linear
from loray.models.runner_sizes import RunnerSizes
from tests.models.sampling_jobs import save_model
from tests.models.tiny_llama import save_llama


@pytest.fixture(autouse=True)
def own_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a rank sets for the whole of its process stays as it is."""
    monkeypatch.setattr(logging, "basicConfig", lambda **_: None)
    monkeypatch.setenv("GOMP_SPINCOUNT", "0")


@pytest.mark.parametrize("quantization", [None, "fp8"])
def test_a_native_model_has_float8_weights_where_the_spec_says_so(tmp_path: Path, quantization: str | None) -> None:
    base = save_llama(tmp_path, hidden_size=64, intermediate_size=96, num_attention_heads=4)
    rank = Rank(0, RankSpec(str(base), "cpu", "float32", 1, RunnerSizes(4, 64), 0.5, quantization=quantization))
    linears = rank._native_runner(("127.0.0.1", 0), torch.device("cpu"))._lora._linears.values()
    assert {isinstance(linear, Linear) and isinstance(linear._packed, Float8Matrix) for linear in linears} == {quantization == "fp8"}


@pytest.mark.parametrize("implementation", ["native", "transformers"])
def test_grammars_read_the_vocabulary_with_the_code_that_the_spec_trusts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, implementation: str
) -> None:
    noted: list[bool] = []
    monkeypatch.setattr(compiled_grammars, "grammar_vocabulary", lambda folder, trust_remote_code: noted.append(trust_remote_code))
    rank = Rank(0, RankSpec(str(save_model(tmp_path)), "cpu", "float32", 1, RunnerSizes(4, 64), 0.5, trust_remote_code=True))
    cpu = torch.device("cpu")
    runner = rank._native_runner(("127.0.0.1", 0), cpu) if implementation == "native" else rank._hosted_runner(cpu)
    runner.grammars.compiled.vocabulary()
    assert noted == [True]
