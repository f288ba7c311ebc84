"""Where the time of 8,192 prompt tokens goes on a GPU, kernel by kernel: `python -m benchmarks.gpu_profile_prompts --out FILE`

In one step of one prompt, and of eight, of the base model and with an adapter of rank 16 for each, on the model that llama_8b.py makes.
"""

import argparse
import json
from pathlib import Path

import torch

from benchmarks.environment import environment
from benchmarks.gpu_decode import PREFILL_ROWS, PREFILL_TOKENS
from benchmarks.gpu_profile import BLOCK, kernels, told
from benchmarks.llama_8b import POOL_PAGES, Case, make
from loray.models.parallel import Parallel
from loray.models.runner import Runner
from loray.models.runner_sizes import RunnerSizes
from loray.models.step import AdapterLoad, Admission, Row, Sampling, Step

NUM_STEPS = 5
PAGES_OF_ADAPTER = 2  # rank 16


class Prompts:
    def __init__(self, folder: Path) -> None:
        model, self._adapters = make(folder)
        sizes = RunnerSizes(max(PREFILL_ROWS), PREFILL_TOKENS + 16, BLOCK, PREFILL_TOKENS)
        self.runner = Runner(model, Parallel(), torch.device("cuda", 0), torch.bfloat16, sizes)
        self.runner.allocate(2 * PREFILL_TOKENS // BLOCK, POOL_PAGES)

    def load(self, names: list[str]) -> None:
        loads = [AdapterLoad(str(self._adapters / name), self._pages(i)) for i, name in enumerate(names)]
        assert not self.runner.execute(Step(0, loads, [], [])).failed_loads

    def compute(self, num_rows: int, has_adapters: bool) -> None:
        size, num_blocks = PREFILL_TOKENS // num_rows, PREFILL_TOKENS // num_rows // BLOCK
        prompt = list(range(100, 100 + size))
        pages = [self._pages(i) if has_adapters else [] for i in range(num_rows)]
        admissions = [Admission(i, prompt, [], 0, page_ids, Sampling()) for i, page_ids in enumerate(pages)]
        rows = [Row(i, size, list(range(i * num_blocks, (i + 1) * num_blocks)), True) for i in range(num_rows)]
        self.runner.execute(Step(1, [], admissions, rows))

    def _pages(self, number: int) -> list[int]:
        return list(range(number * PAGES_OF_ADAPTER, (number + 1) * PAGES_OF_ADAPTER))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm/loray"))
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    results = environment("python -m benchmarks.gpu_profile_prompts --out FILE")
    prompts = Prompts(arguments.folder)
    prompts.load(Case(max(PREFILL_ROWS), max(PREFILL_ROWS)).names)
    for num_rows in PREFILL_ROWS:
        for has_adapters in (False, True):

            def work(num_rows: int = num_rows, has_adapters: bool = has_adapters) -> None:
                for _ in range(NUM_STEPS):
                    prompts.compute(num_rows, has_adapters)

            work()
            started, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            started.record()
            work()
            ended.record()
            torch.cuda.synchronize()
            label = f"{num_rows} prompts, {num_rows if has_adapters else 0} adapters"
            results[label] = told(started.elapsed_time(ended) / NUM_STEPS, kernels(work, NUM_STEPS))
            print(label, json.dumps(results[label], indent=2), flush=True)
    arguments.out.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
