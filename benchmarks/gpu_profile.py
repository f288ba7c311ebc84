"""Where a decode step's time goes on a GPU, kernel by kernel: `python -m benchmarks.gpu_profile --rows 32 --adapters 8`

One rank in this process, on the model and adapters that gpu_decode.py makes.
"""

import argparse
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.environment import environment
from benchmarks.llama_8b import NUM_PROMPT, POOL_PAGES, Case, make
from loray.models.parallel import Parallel
from loray.models.runner import Runner
from loray.models.runner_sizes import RunnerOptions, RunnerSizes
from loray.models.step import AdapterLoad, Admission, Row, Sampling, Step

NUM_STEPS = 20
BLOCK = 16


class Decoding:
    """Rows that have their prompts computed, and decode step by step."""

    def __init__(self, folder: Path, max_running: int, num_pages: int = POOL_PAGES, **flags: bool) -> None:
        """flags: RunnerOptions."""
        model, self._adapters = make(folder)
        sizes, options = RunnerSizes(max_running, 4096, BLOCK), RunnerOptions(**flags)
        self.runner = Runner(model, Parallel(), torch.device("cuda", 0), torch.bfloat16, sizes, options)
        self.runner.allocate(max_running * 64, num_pages)
        self._step_id = 0

    def begin(self, case: Case, sampling: Sampling | None = None) -> None:
        pages: list[list[int]] = []
        for name in case.names:
            rank = json.loads((self._adapters / name / "adapter_config.json").read_text())["r"]
            first = sum(map(len, pages))
            pages.append(list(range(first, first + -(-rank // 8))))
        loads = [AdapterLoad(str(self._adapters / name), page_ids) for name, page_ids in zip(case.names, pages, strict=True)]
        prompt = list(range(100, 100 + NUM_PROMPT))
        sampling = sampling or Sampling()
        admissions = [Admission(i, prompt, [], 0, pages[i % len(pages)] if pages else [], sampling) for i in range(case.rows)]
        blocks = [list(range(64 * i, 64 * (i + 1))) for i in range(case.rows)]
        self._run(Step(0, loads, admissions, [Row(i, NUM_PROMPT, blocks[i], True) for i in range(case.rows)]))
        self._rows = [Row(i, 1, [], True) for i in range(case.rows)]

    def decode(self, num_steps: int) -> None:
        """One ahead, as a rank does it."""
        launched = self.runner.launch(Step(1, [], [], self._rows))
        for _ in range(num_steps - 1):
            following = self.runner.launch(Step(1, [], [], self._rows))
            launched.result()
            launched = following
        launched.result()

    def _run(self, step: Step) -> None:
        assert not self.runner.execute(step).failed_loads


def step_ms(decoding: Decoding) -> float:
    """Milliseconds a step from its start to its end."""
    decoding.decode(5)
    started, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    started.record()
    decoding.decode(NUM_STEPS)
    ended.record()
    torch.cuda.synchronize()
    return started.elapsed_time(ended) / NUM_STEPS


def kernels(work: Callable[[], object], num_steps: int) -> Counter[str]:
    """Milliseconds a step of each kernel. work: so many steps."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        work()
        torch.cuda.synchronize()
    times: Counter[str] = Counter()
    for event in profiled.key_averages():
        times[f"{event.key[:90]} x{event.count / num_steps:g}"] += event.self_device_time_total / num_steps / 1000
    return times


def told(milliseconds: float, times: Counter[str]) -> dict[str, object]:
    return {
        "ms a step": round(milliseconds, 3),
        "ms of all kernels": round(times.total(), 3),
        "ms of each kernel and its launches": {name: round(spent, 3) for name, spent in times.most_common(16)},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm/loray"))
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--adapters", type=int, nargs="+", default=[0, 8, 32])
    parser.add_argument("--no-lora", action="store_true", help="no room for adapters on the server")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    results = environment("python -m benchmarks.gpu_profile" + " --no-lora" * arguments.no_lora + " --out FILE")
    decoding = Decoding(arguments.folder, arguments.rows, 0 if arguments.no_lora else POOL_PAGES)
    for count in [0] if arguments.no_lora else arguments.adapters:
        case = Case(arguments.rows, count)
        decoding.begin(case)
        milliseconds, times = step_ms(decoding), kernels(lambda: decoding.decode(NUM_STEPS), NUM_STEPS)
        results[f"{case.rows} rows, {case.adapters} adapters"] = told(milliseconds, times)
        print(f"{case.rows} rows, {case.adapters} adapters: {milliseconds:.3f} ms a step, {times.total():.3f} ms of kernels")
        for name, spent in times.most_common(16):
            print(f"  {spent:7.3f}  {name}")
    if arguments.out:
        arguments.out.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
