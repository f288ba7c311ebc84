"""A rank in this process: what it makes of its spec."""

import logging
from pathlib import Path

import pytest
import torch

from loray.cluster.rank import Rank, RankSpec
from loray.models import compiled_grammars
from tests.models.sampling_jobs import save_model


@pytest.mark.parametrize("implementation", ["native", "transformers"])
def test_grammars_read_the_vocabulary_with_the_code_that_the_spec_trusts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, implementation: str
) -> None:
    noted: list[bool] = []
    monkeypatch.setattr(compiled_grammars, "grammar_vocabulary", lambda folder, trust_remote_code: noted.append(trust_remote_code))
    monkeypatch.setattr(logging, "basicConfig", lambda **_: None)  # a rank has a process of its own
    monkeypatch.setenv("GOMP_SPINCOUNT", "0")
    rank = Rank(0, RankSpec(str(save_model(tmp_path)), "cpu", "float32", 1, 4, 64, 16, 0.5, trust_remote_code=True))
    cpu = torch.device("cpu")
    runner = rank._native_runner(("127.0.0.1", 0), cpu) if implementation == "native" else rank._hosted_runner(cpu)
    runner.grammars.compiled.vocabulary()
    assert noted == [True]
