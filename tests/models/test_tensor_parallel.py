"""The same tokens on 1, 2, 3 and 4 ranks, whatever does not divide evenly."""

from pathlib import Path
from typing import Any

import pytest
import torch

from loray.models.parallel import Parallel
from tests.models.conductor import Output
from tests.models.group_of_one import group_of_one
from tests.models.rank_jobs import PAGES, Answers, Case, do_everything, play, sum_or_fail
from tests.models.rank_processes import RankError, RankGroup, run_ranks
from tests.models.rank_threads import ThreadGroup
from tests.models.tiny_llama import save_adapter, save_llama

pytestmark = pytest.mark.slow

MODELS: dict[str, dict[str, Any]] = {
    "nine_heads_three_kv": {"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 36, "tie_word_embeddings": True},
    "six_heads_two_kv_biases": {"attention_bias": True, "mlp_bias": True, "head_dim": 10},
}


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> list[Case]:
    root = tmp_path_factory.mktemp("tensor_parallel")
    bases = [save_llama(root / name, **settings) for name, settings in MODELS.items()]
    return [(base, {r: save_adapter(base, Path(f"{base}-r{r}"), r=r, lora_alpha=r) for r in PAGES}) for base in bases]


@pytest.fixture(scope="module")
def alone(cases: list[Case]) -> list[Output]:
    return [output for case in cases for output in play(Parallel(), *case)]


@pytest.fixture(scope="module", params=[2, 3, 4])
def answers(request: pytest.FixtureRequest, cases: list[Case]) -> list[Answers]:
    """One for each rank. More ranks than key heads occur with 4."""
    return run_ranks(request.param, do_everything, cases)


def test_every_rank_gives_the_tokens_that_one_rank_gives(answers: list[Answers], alone: list[Output]) -> None:
    for answer in answers:
        for expected, found in zip(alone, answer.outputs, strict=True):
            assert found.token_ids == expected.token_ids
            assert found.logprobs == pytest.approx(expected.logprobs, abs=2e-4)


def test_one_rank_with_a_group_of_its_own_gives_the_same_tokens(cases: list[Case], alone: list[Output], tmp_path: Path) -> None:
    with group_of_one(tmp_path, "cpu") as parallel:
        found = [output for case in cases for output in play(parallel, *case)]
    assert [output.token_ids for output in found] == [output.token_ids for output in alone]


def test_an_adapter_that_one_rank_cannot_read_fails_on_all(answers: list[Answers]) -> None:
    assert [list(answer.failed_loads) for answer in answers] == [[1]] * len(answers)


def test_collectives_join_uneven_parts(answers: list[Answers]) -> None:
    for answer in answers:
        assert answer.reduced == [sum(range(len(answers) + 1))] * 2
        assert answer.gathered == [list(range(7)), list(range(7, 14)), list(range(14, 21))]


@pytest.mark.parametrize("kind", [RankGroup, ThreadGroup])
def test_a_group_takes_job_after_job_also_after_one_that_failed(kind: type[RankGroup] | type[ThreadGroup]) -> None:
    group = kind(2)
    try:
        assert group.run(sum_or_fail, 1.0) == [2.0, 2.0]
        assert group.run(sum_or_fail, 2.0) == [4.0, 4.0]
        with pytest.raises(RankError, match=r"rank 1: (.|\n)*this rank cannot"):
            group.run(sum_or_fail, -1.0)
        assert group.run(sum_or_fail, 3.0) == [6.0, 6.0]
    finally:
        group.close()


def test_ranks_in_threads_that_do_not_meet_are_told_apart() -> None:
    group = ThreadGroup(3)
    with pytest.raises(RankError, match="rank 0: (.|\n)*the others do not come to this collective"):
        group.run(lambda parallel: parallel.rank == 1 or parallel.all_reduce(torch.ones(2)))
    with pytest.raises(RankError, match="rank 2: (.|\n)*equal size"):
        group.run(lambda parallel: parallel.all_reduce(torch.ones(2 + parallel.rank)))
