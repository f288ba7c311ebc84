"""Keys and values in float8, on a CPU with the kernels' twins and on a GPU: nearly the logits of a cache in full, in fewer bytes."""

import logging
from pathlib import Path

import pytest
import torch

from loray.models import kv_scales
from loray.models import runner as runner_module
from loray.models.kv_cache import FLOAT8, KVCache
from loray.models.kv_scales import random_prompt
from loray.models.parallel import Parallel
from loray.models.runner import Runner
from loray.models.runner_sizes import RunnerOptions, RunnerSizes
from loray.models.step import Admission, Row, Sampling, Step
from tests.models.conductor import Conductor, Request, prompt_of
from tests.models.tiny_llama import oracle

NUM_BLOCKS = 24
MAX_DIFFERENCE = 0.03  # of log-probabilities between devices: a few numbers lie between two of float8, and one that goes up costs 0.01


def make_runner(base: Path, has_float8_cache: bool) -> Runner:
    device = torch.device("cpu")
    runner = Runner(base, Parallel(), device, torch.float32, RunnerSizes(4, 128), RunnerOptions(has_float8_cache=has_float8_cache))
    assert runner.allocate(NUM_BLOCKS, 8) == NUM_BLOCKS
    return runner


@pytest.fixture(autouse=True)
def paged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner_module, "uses_triton", lambda device: True)


def first_tokens(runner: Runner) -> list[tuple[int, float]]:
    """The first three and their log-probabilities, of a prompt in two chunks."""
    prompt = prompt_of(40)
    rows = [Row(1, 24, [3, 7], False), Row(1, 16, [5], True), Row(1, 1, [], True), Row(1, 1, [], True)]
    admissions = [[Admission(1, prompt, [], 0, [], Sampling())], [], [], []]
    found = []
    for number, (row, admitted) in enumerate(zip(rows, admissions, strict=True)):
        result = runner.execute(Step(number, [], admitted, [row]))
        found += zip(result.token_ids, result.logprobs, strict=True)
    return found


def test_it_gives_nearly_the_same_and_takes_a_quarter_of_the_bytes(base: Path) -> None:
    exact, small = make_runner(base, False), make_runner(base, True)
    assert small.report(0.5).block_bytes * 4 == exact.report(0.5).block_bytes
    for (_, expected), (_, found) in zip(first_tokens(exact), first_tokens(small), strict=True):
        assert found == pytest.approx(expected, abs=0.1)
        assert found != expected


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")
def test_a_gpu_gives_the_tokens_of_the_twins(base: Path, adapters: dict[int, Path]) -> None:
    """Steps that score a prompt are launched kernel by kernel, the others are graphs."""
    pages = list(range(8))
    seeds = {5: [], 1: pages, 14: pages, 7: []}  # whose tokens are well ahead of the next best
    requests = [Request(prompt_of(40, seed), page_ids, wants_prompt_logprobs=seed > 5) for seed, page_ids in seeds.items()]
    outputs = []
    for device in ("cpu", "cuda"):
        conductor = Conductor(base, device=device, has_float8_cache=True)
        conductor.load(adapters[64], pages)
        outputs.append(conductor.play(requests, chunk=24, stagger=1))
    for expected, found in zip(*outputs, strict=True):
        assert found.token_ids == expected.token_ids
        assert found.logprobs == pytest.approx(expected.logprobs, abs=MAX_DIFFERENCE)
        assert found.prompt_logprobs == pytest.approx(expected.prompt_logprobs, abs=MAX_DIFFERENCE)


def test_every_layer_has_scales_with_twice_the_room_that_the_prompt_needs(base: Path) -> None:
    cache = make_runner(base, True)._kv_cache
    assert cache is not None and all(layer.blocks.dtype == FLOAT8 for layer in cache.layers)
    model = oracle(base)
    with torch.inference_mode():
        prompt = torch.tensor([random_prompt(model.config.vocab_size, 128)])
        expected = [[layer.keys.abs().max(), layer.values.abs().max()] for layer in model(prompt, use_cache=True).past_key_values.layers]
    scales = torch.stack([layer.scales for layer in cache.layers if layer.scales is not None])
    torch.testing.assert_close(scales, torch.tensor(expected) * 2 / 448, rtol=1e-4, atol=0)
    assert len(scales.unique()) == scales.numel(), "none could be taken for another"


def test_the_largest_key_and_value_are_found_whatever_their_sign() -> None:
    cache = KVCache(2, 3, (4, 2, 8))
    for blocks, _ in cache.layers:
        blocks.zero_()
    cache.layers[0].blocks[2, 1, 1, 5] = -3.0  # a key
    cache.layers[1].blocks[0, 3, 3, 7] = 5.0  # a value
    assert cache.largest().tolist() == [[3.0, 0.0], [0.0, 5.0]]


def test_the_log_tells_what_it_costs(base: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    with caplog.at_level(logging.INFO, "loray.kv_scales"):
        make_runner(base, True)
        monkeypatch.setattr(kv_scales, "HEADROOM", 1 / 16)  # most keys and values are cut
        make_runner(base, True)
    (mean, largest, spread), (cut_mean, *_) = (map(float, record.args) for record in caplog.records)  # type: ignore[arg-type]
    assert 0 < mean < 0.1 * spread and mean < largest < spread
    assert cut_mean > 5 * mean
