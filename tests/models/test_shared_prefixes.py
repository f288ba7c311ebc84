"""Many prompts behind one prefix that is in the cache: its keys are not copied for each of them when they come all at once."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from loray.kernels.prefix_gather import gather_prefix
from loray.kernels.varlen_attention import FLASH_ATTN
from loray.models import attention, runner_sizes
from loray.models import runner as runner_module
from loray.models.step import Admission, Row, Sampling
from tests.kernels.triton_marks import ON_GPU
from tests.models.conductor import BLOCK_SIZE, Conductor, prompt_of

NUM_BLOCKS, NUM_PROMPTS, NUM_NEW = 6, 20, 28  # more tokens than a graph has
MANY_KEYS = 2300  # fewer than all of them have, more than half


def ask(conductor: Conductor, slots: range) -> list[float]:
    """Log-probabilities of the tokens that follow the prompts of these slots, all in one step."""
    shared = conductor.blocks(0, 0, NUM_BLOCKS * BLOCK_SIZE)
    num_computed = len(shared) * BLOCK_SIZE
    prefix = prompt_of(num_computed)
    admissions = [Admission(slot, prefix + prompt_of(NUM_NEW, seed=slot), shared, num_computed, [], Sampling()) for slot in slots]
    own = NUM_BLOCKS * 16  # behind the shared ones, two for each
    return conductor.step([Row(slot, NUM_NEW, [own + 2 * slot, own + 2 * slot + 1], True) for slot in slots], admissions)[1]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=ON_GPU)])
def test_keys_that_many_share_are_copied_no_more_often_than_there_is_room_for(
    base: Path, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied: list[int] = []

    def gather(kv_cache: Tensor, block_table: Tensor, cu_k: Tensor, total_k: int) -> tuple[Tensor, Tensor]:
        copied.append(total_k)
        return gather_prefix(kv_cache, block_table, cu_k, total_k)

    monkeypatch.setattr(attention, "gather_prefix", gather)
    monkeypatch.setattr(runner_sizes, "MANY_KEYS", MANY_KEYS)
    if device == "cpu":
        monkeypatch.setattr(runner_module, "uses_triton", lambda device: True)
        monkeypatch.setattr(attention, "backend", lambda *shape: FLASH_ATTN)
    conductor = Conductor(base, device=device, dtype=torch.float32 if device == "cpu" else torch.bfloat16, max_running=32)
    num_shared = NUM_BLOCKS * BLOCK_SIZE
    conductor.step(
        [Row(0, num_shared, conductor.blocks(0, 0, num_shared), False)], [Admission(0, prompt_of(num_shared), [], 0, [], Sampling())]
    )
    assert 0.85 * MANY_KEYS < max(copied) <= MANY_KEYS  # tried at the start
    copied.clear()
    few = [*ask(conductor, range(1, 11)), *ask(conductor, range(11, 21))]
    assert copied or device == "cuda"  # or replayed
    copied.clear()
    assert ask(conductor, range(1, 1 + NUM_PROMPTS)) == pytest.approx(few, abs=1e-5 if device == "cpu" else 0.05)
    assert not copied
