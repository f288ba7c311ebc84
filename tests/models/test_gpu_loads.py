"""Adapters on their way to a GPU: no step waits for them, and one that finds no room harms nobody."""

from pathlib import Path

import pytest
import torch

from loray.models.step import AdapterLoad, Step
from tests.kernels.triton_marks import REAL_GPU
from tests.models.conductor import Conductor, Request, prompt_of
from tests.models.families import FAMILIES, save_family
from tests.models.peft_items import items_of, save_item

pytestmark = REAL_GPU
ITEMS = items_of("llama")


@pytest.mark.parametrize("item", ITEMS)
def test_no_kind_of_adapter_that_is_in_host_memory_makes_the_host_wait_for_steps(item: str, tmp_path: Path) -> None:
    base = save_family(FAMILIES["llama"], tmp_path).base
    folder = save_item(base, tmp_path / "adapter", ITEMS[item])
    conductor = Conductor(base, device="cuda", num_pages=64)
    conductor.runner.host_adapters.prepare(str(folder), "")
    conductor.load(folder, list(range(32)))  # what is made at its first use is there
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        launched = conductor.runner.launch(Step(1, [AdapterLoad(str(folder), list(range(32, 64)))], [], []))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert not launched.result().failed_loads


def test_an_adapter_that_the_gpu_has_no_room_for_fails_alone(base: Path, adapters: dict[int, Path]) -> None:
    conductor = Conductor(base, device="cuda")
    conductor.load(adapters[4], [9])
    request = Request(prompt_of(9), [9])
    (expected,) = conductor.play([request])
    step = Step(1, [AdapterLoad(str(adapters[64]), list(range(8)))], [], [])
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(1e-6)
    try:
        failed = conductor.runner.execute(step).failed_loads
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert "the GPU has no" in failed[0] and "lower kv_cache.memory_fraction" in failed[0]
    assert conductor.play([request])[0].token_ids == expected.token_ids
    assert not conductor.runner.execute(step).failed_loads


def test_the_first_adapter_waits_for_no_compiler(base: Path, adapters: dict[int, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    import triton

    from loray.kernels import page_scatter

    page_scatter._scatter_kernel.device_caches.clear()  # as in a new process
    conductor = Conductor(base, device="cuda")
    compiled: list[str] = []
    monkeypatch.setattr(triton.knobs.runtime, "jit_post_compile_hook", lambda **about: compiled.append(about["repr"]))
    conductor.load(adapters[4], [9])
    assert not compiled
    page_scatter._scatter_kernel.device_caches.clear()
    conductor.load(adapters[4], [9])
    assert len(compiled) == 1  # it would have been noticed
