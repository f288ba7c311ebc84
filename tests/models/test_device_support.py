"""What a GPU must have, and what happens where memory is short."""

import logging
import mmap
import resource
import threading
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch import Tensor

from loray.models import causal_lm as causal_lm_module
from loray.models import cuda_graph, device_support
from loray.models import runner as runner_module
from loray.models.batch import Batch
from loray.models.causal_lm import CausalLMRunner
from loray.models.cuda_graph import DecodeGraphs
from loray.models.decode_inputs import DecodeInputs
from loray.models.device_memory import claimed, fits
from loray.models.device_support import UnsupportedDevice, check_compiler, check_device, check_gpu
from loray.models.kv_cache import KVCache
from loray.models.llama import LlamaMLP
from loray.models.parallel import Parallel
from loray.models.runner import Runner
from loray.models.runner_sizes import RunnerOptions, RunnerSizes
from loray.models.step import Step, StepResult
from loray.models.warm_up import StepLimits, warm_up_steps
from tests.models.conductor import Conductor
from tests.models.families import FAMILIES, save_family
from tests.models.rank_processes import RankError
from tests.models.rank_threads import ThreadGroup

pytestmark = pytest.mark.slow

TOO_MANY_BYTES = 1 << 48  # more than a process can address
NO_FLOAT8 = (False, False)  # neither the cache nor the weights
SIZES = RunnerSizes(4, 128)


@pytest.mark.parametrize(
    ("capability", "head_dim", "float8", "words"),
    [
        ((7, 5), 64, NO_FLOAT8, r"Card has compute capability 7\.5; loray needs 8\.0 \(A100\) or newer"),
        ((8, 0), 64, (True, False), r"kv_cache\.dtype: fp8 needs compute capability 8\.9 .* Card has 8\.0: use auto"),
        ((8, 6), 64, (False, True), r"model\.quantization: fp8 needs compute capability 8\.9 .* Card has 8\.6: leave it out"),
        ((9, 0), 512, NO_FLOAT8, "heads of 512; on a GPU loray attends heads of up to 256"),
    ],
)
def test_what_a_gpu_lacks_is_named(capability: tuple[int, int], head_dim: int, float8: tuple[bool, bool], words: str) -> None:
    with pytest.raises(UnsupportedDevice, match=words):
        check_gpu("Card", capability, head_dim, *float8)


def test_a_machine_without_a_compiler_is_refused_until_triton_has_compiled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    for name, value in (("TRITON_CACHE_DIR", str(cache)), ("PATH", ""), ("CC", "")):
        monkeypatch.setenv(name, value)
    for _ in range(2):
        with pytest.raises(UnsupportedDevice, match="needs a C compiler and Python's headers.*install gcc and python3-dev, or set CC"):
            check_compiler()
        cache.mkdir(exist_ok=True)
    (cache / "compiled").touch()
    check_compiler()
    monkeypatch.setenv("TRITON_CACHE_DIR", "")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("CC", "/usr/bin/cc")
    check_compiler()


def test_a_gpu_of_another_maker_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "7.1")
    with pytest.raises(UnsupportedDevice, match=r"this torch is made for ROCm 7\.1; on a GPU loray needs one that is made for CUDA"):
        check_device(torch.device("cuda"))


@pytest.mark.parametrize(("capability", "has_float8"), [((8, 0), False), ((8, 9), True), ((9, 0), True), ((10, 0), True)])
def test_others_are_taken(capability: tuple[int, int], has_float8: bool) -> None:
    check_gpu("Card", capability, 256, has_float8, has_float8)


def test_where_the_blocks_do_not_fit_there_are_fewer_and_the_log_says_so(
    base: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner_module, "FEWER_BLOCKS", 1e-6)  # from that many on, nine tenths would take a hundred attempts
    runner = Runner(base, Parallel(), torch.device("cpu"), torch.float32, SIZES)
    too_many = TOO_MANY_BYTES // runner.report(0.5).block_bytes
    with caplog.at_level(logging.WARNING, "loray.runner"):
        num_blocks = runner.allocate(too_many, 8)
    assert 0 < num_blocks < too_many
    assert runner._kv_cache is not None and len(runner._kv_cache.layers[0].blocks) == num_blocks
    assert f"out of memory with {too_many} KV blocks: trying" in caplog.records[0].getMessage()
    assert str(num_blocks) in caplog.records[-1].getMessage()


def test_where_the_rank_pages_do_not_fit_the_setting_is_named(base: Path) -> None:
    hosted = CausalLMRunner(base, torch.device("cpu"), torch.float32, SIZES)
    for runner in (Runner(base, Parallel(), torch.device("cpu"), torch.float32, SIZES), hosted):
        too_many = 100 * TOO_MANY_BYTES // runner.report(0.5).page_bytes  # for each of the linears
        with pytest.raises(MemoryError, match=rf"no room for {too_many} rank pages of \d+ bytes; lower adapters\.gpu_bytes"):
            runner.allocate(8, too_many)


def test_where_the_prompt_for_the_float8_scales_does_not_fit_the_setting_is_named(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def largest(self: KVCache) -> Tensor:
        raise out_of_memory()

    monkeypatch.setattr(KVCache, "largest", largest)
    with pytest.raises(MemoryError, match=r"no room for the prompt that the float8 cache is fitted to; lower adapters\.gpu_bytes"):
        Runner(base, Parallel(), torch.device("cpu"), torch.float32, SIZES, RunnerOptions(has_float8_cache=True)).allocate(8, 8)


@pytest.mark.parametrize(
    ("capability", "settings", "message"),
    [
        ((7, 5), {}, r"Card has compute capability 7\.5"),
        ((8, 0), {"has_float8_cache": True}, r"kv_cache\.dtype: fp8 needs"),
        ((8, 0), {"has_float8_weights": True}, r"model\.quantization: fp8 needs"),
    ],
)
def test_a_gpu_is_looked_at_before_weights_take_room(
    capability: tuple[int, int], settings: dict[str, bool], message: str, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Card")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(runner_module, "born_on", lambda device, dtype: nullcontext())
    monkeypatch.setattr(runner_module, "model_class", lambda _: pytest.fail("room is taken for them"))
    with pytest.raises(UnsupportedDevice, match=message):
        Runner(base, Parallel(), torch.device("cuda"), torch.float32, SIZES, RunnerOptions(**settings))  # type: ignore[arg-type]


def test_a_model_with_heads_that_no_kernel_takes_is_refused(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Card")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(runner_module, "born_on", lambda device, dtype: nullcontext())
    monkeypatch.setattr(device_support, "MAX_HEAD_DIM", 4)
    with pytest.raises(UnsupportedDevice, match=r"heads of \d+; on a GPU loray attends heads of up to 4"):
        Runner(base, Parallel(), torch.device("cuda"), torch.float32, SIZES)


def test_a_model_that_transformers_runs_needs_as_new_a_gpu(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Card")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    with pytest.raises(UnsupportedDevice, match=r"Card has compute capability 7\.5"):
        CausalLMRunner(base, torch.device("cuda"), torch.float16, SIZES)


def test_who_attends_is_told_by_the_models_cap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner_module, "shown_backend", lambda device, dtype, kv_dtype, head_dim, score_cap: f"cap {score_cap}")
    assert Conductor(save_family(FAMILIES["gemma2"], tmp_path).base).report.attention == "cap 2.0"


def out_of_memory() -> torch.OutOfMemoryError:
    return torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


def test_weights_that_do_not_fit_are_refused_with_what_helps(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run_out(*arguments: object) -> None:
        raise out_of_memory()

    monkeypatch.setattr(runner_module, "load_weights", run_out)
    monkeypatch.setattr(causal_lm_module, "HostedModel", run_out)
    words = r"weights do not fit into this machine's memory: a larger tensor_parallel_size"
    with pytest.raises(MemoryError, match=words):
        Runner(base, Parallel(), torch.device("cpu"), torch.float32, SIZES)
    with pytest.raises(MemoryError, match=words):
        CausalLMRunner(base, torch.device("cpu"), torch.float32, SIZES)


def test_where_the_first_steps_do_not_fit_there_are_fewer_blocks(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner_module, "uses_triton", lambda device: True)
    execute = Runner.execute

    def execute_few(self: Runner, step: Step) -> StepResult:
        assert self._kv_cache is not None
        if len(self._kv_cache.layers[0].blocks) > 80 and len(step.rows) == 4:
            raise out_of_memory()
        return execute(self, step)

    monkeypatch.setattr(Runner, "execute", execute_few)
    assert Runner(base, Parallel(), torch.device("cpu"), torch.float32, SIZES).allocate(100, 8) == 72  # 100, 90, 81


def test_where_one_rank_has_no_room_for_the_first_steps_all_have_fewer_blocks(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner_module, "uses_triton", lambda device: True)
    execute = Runner.execute

    def execute_few(self: Runner, step: Step) -> StepResult:
        result = execute(self, step)
        if self._parallel.rank == 1 and len(self._kv_cache.layers[0].blocks) > 95:  # type: ignore[union-attr]
            raise out_of_memory()
        return result

    monkeypatch.setattr(Runner, "execute", execute_few)

    def allocated(parallel: Parallel) -> int:
        return Runner(base, parallel, torch.device("cpu"), torch.float32, SIZES).allocate(100, 8)

    assert ThreadGroup(2).run(allocated) == [90, 90]


def test_ranks_of_a_group_do_the_first_steps_apart_and_then_together(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner_module, "uses_triton", lambda device: True)
    execute = Runner.execute
    done: dict[int, list[bool]] = {0: [], 1: []}  # by rank: whether each step was done apart

    def noted(self: Runner, step: Step) -> StepResult:
        done[self._parallel.rank].append(self._parallel._is_apart)
        return execute(self, step)

    monkeypatch.setattr(Runner, "execute", noted)
    ThreadGroup(2).run(lambda parallel: Runner(base, parallel, torch.device("cpu"), torch.float32, SIZES).allocate(100, 8))
    num_steps = len(warm_up_steps(StepLimits(SIZES, 100, 8)))
    assert done == dict.fromkeys((0, 1), [True] * num_steps + [False] * num_steps)


def test_where_one_rank_runs_out_within_a_step_no_other_waits_for_it(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner_module, "uses_triton", lambda device: True)
    runners: dict[int, Runner] = {}
    forward = LlamaMLP.forward

    def forward_few(self: LlamaMLP, x: Tensor, batch: Batch) -> Tensor:
        cache = runners[1]._kv_cache if self.down_proj._parallel.rank == 1 else None
        if cache and len(cache.layers[0].blocks) > 95:
            raise out_of_memory()
        return forward(self, x, batch)

    monkeypatch.setattr(LlamaMLP, "forward", forward_few)

    def allocated(parallel: Parallel) -> int:
        runners[parallel.rank] = Runner(base, parallel, torch.device("cpu"), torch.float32, SIZES)
        return runners[parallel.rank].allocate(100, 8)

    assert ThreadGroup(2).run(allocated) == [90, 90]


class ShortOfMemory(DecodeGraphs):
    """Captures nothing, and may run out of memory at one size, as it is tried, apart or with the others, or captured."""

    full_at: tuple[int, bool] | None = None
    tried_full_at: tuple[int, bool] | None = None
    full_together_at: tuple[int, bool] | None = None
    parallel: Parallel

    def capture(self, has_lora: bool, parallel: Parallel, device: torch.device) -> bool:
        self.parallel = parallel
        return super().capture(has_lora, parallel, device)

    def _run(self, size: int, lora: bool) -> None:
        if (size, lora) == (self.tried_full_at if self.parallel._is_apart else self.full_together_at):
            raise out_of_memory()

    def _capture(self, size: int, lora: bool, pool: object) -> None:
        if (size, lora) == self.full_at:
            raise out_of_memory()
        self._graphs[size, lora] = object()  # type: ignore[assignment]


def captures(graphs: DecodeGraphs, parallel: Parallel) -> bool:
    return graphs.capture(True, parallel, torch.device("cpu"))


@pytest.mark.parametrize("when", ["full_at", "tried_full_at"])
@pytest.mark.parametrize(("full_at", "num_there"), [((512, False), 0), ((64, True), 25), ((1, True), 45), (None, 46)])
def test_all_ranks_stop_capturing_where_one_runs_out_of_memory(
    full_at: tuple[int, bool] | None, num_there: int, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)

    def captured(parallel: Parallel) -> tuple[bool, int, list[bool]]:
        device = torch.device("cpu")
        graphs = ShortOfMemory(DecodeInputs(512, torch.zeros(5, 9), torch.zeros(5, 2)), lambda batch: pytest.fail("nothing is run"))
        setattr(graphs, when, full_at if parallel.rank == 1 else None)
        has_room = captures(graphs, parallel)
        return has_room, len(graphs._graphs), parallel.any_rank([parallel.rank == 0, False], device)

    first, second = ThreadGroup(2).run(captured)
    is_whole = full_at is None
    assert first == (is_whole, num_there + (when == "full_at" and not is_whole), [True, False])
    assert second == (is_whole, num_there, [True, False])


class Clock(threading.local):
    """Of each rank's thread."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now


def test_where_one_rank_is_late_all_have_the_same_graphs(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(cuda_graph, "time", clock)

    class Late(ShortOfMemory):
        def _capture(self, size: int, lora: bool, pool: object) -> None:
            super()._capture(size, lora, pool)
            clock.now = cuda_graph.CAPTURE_S + 1 if self.parallel.rank == 1 and len(self._graphs) == 7 else 0.0

    def captured(parallel: Parallel) -> int:
        graphs = Late(DecodeInputs(512, torch.zeros(5, 9), torch.zeros(5, 2)), lambda batch: pytest.fail("nothing is run"))
        assert captures(graphs, parallel)
        return len(graphs._graphs)

    with caplog.at_level(logging.WARNING, "loray.graphs"):
        assert ThreadGroup(2).run(captured) == [7, 7]
    assert "decodes were left out" in caplog.text


def test_a_rank_that_runs_out_of_memory_in_a_decode_with_the_others_says_so_and_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who took it for a lack of room would meet the others in another sum."""
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)

    def captured(parallel: Parallel) -> None:
        graphs = ShortOfMemory(DecodeInputs(512, torch.zeros(5, 9), torch.zeros(5, 2)), lambda batch: pytest.fail("nothing is run"))
        graphs.full_together_at = (64, True) if parallel.rank == 1 else None
        captures(graphs, parallel)

    with pytest.raises(RankError, match=r"rank 1: (.|\n)*MemoryError: a rank ran out of memory .*: lower kv_cache\.memory_fraction"):
        ThreadGroup(2).run(captured)


@pytest.mark.parametrize(("is_beside_graphs", "num_captures"), [(False, 1), (True, 6)])
def test_what_does_not_fit_is_found_before_graphs_are_captured_and_beside_them(
    is_beside_graphs: bool, num_captures: int, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner_module, "uses_triton", lambda device: True)
    execute, captures = Runner.execute, []

    class Captured:
        is_captured = False

        def capture(self, *args: object) -> bool:
            captures.append(self)
            self.is_captured = True
            return True

        def can_run(self, layout: object) -> bool:
            return False

    def execute_few(self: Runner, step: Step) -> StepResult:
        self._graphs = graphs = self._graphs or Captured()  # type: ignore[assignment]
        if graphs.is_captured == is_beside_graphs and len(self._kv_cache.layers[0].blocks) > 60:  # type: ignore[union-attr]
            raise out_of_memory()
        return execute(self, step)

    monkeypatch.setattr(Runner, "execute", execute_few)
    assert Runner(base, Parallel(), torch.device("cpu"), torch.float32, SIZES).allocate(100, 8) == 57  # 100, 90, 81, 72, 64
    assert len(captures) == num_captures


def test_capturing_ends_when_its_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(cuda_graph, "CAPTURE_S", 0.0)
    graphs = ShortOfMemory(DecodeInputs(512, torch.zeros(5, 9), torch.zeros(5, 2)), lambda batch: pytest.fail("nothing is run"))
    assert captures(graphs, Parallel()) and len(graphs._graphs) == 1


def test_an_error_that_came_of_running_out_of_memory_counts_as_that() -> None:
    def run(error: Exception) -> None:
        try:
            raise error
        finally:
            raise RuntimeError("CUDA error: capturing stream has unjoined work")

    assert not fits(lambda: run(out_of_memory()))
    assert not fits(lambda: run(RuntimeError("Triton Error [CUDA]: out of memory")))
    with pytest.raises(RuntimeError, match="unjoined"):
        fits(lambda: run(RuntimeError("CUDA error: an illegal memory access was encountered")))
    assert fits(lambda: None)


def test_a_pool_takes_its_memory_at_once() -> None:
    """Else a server grows for hours, until every block was used once."""
    pool = torch.frombuffer(mmap.mmap(-1, 64 << 20), dtype=torch.uint8)
    before = resident_bytes()
    claimed(pool)
    assert resident_bytes() - before > 0.9 * pool.nbytes


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
