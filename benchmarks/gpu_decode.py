"""Decode steps on a GPU, engine and rank process without Ray: `python -m benchmarks.gpu_decode --folder /dev/shm/loray`

Llama-3.1-8B's shape with random weights, 128-token prompts, greedy. Milliseconds a step: the time for 136 new tokens less that for 8,
divided by 128, as the peer's script measures it. Makes model and adapters in the folder first, where they are missing.
"""

import argparse
import json
import random
import threading
import time
from pathlib import Path

import msgspec
import zmq

from benchmarks.environment import environment
from benchmarks.llama_8b import LINEARS, NUM_LAYERS, NUM_PROMPT, POOL_PAGES, Case, make
from benchmarks.local_group import LocalGroup
from loray.cluster.channel import bind
from loray.deployments.adapter_files import AdapterFiles
from loray.deployments.config import ServerArgs
from loray.deployments.driver import rank_spec, start_engine
from loray.deployments.request import GenerationRequest, TokenEvent
from loray.models.step import Sampling

SHORT, LONG = 8, 136
PREFILL_TOKENS = 8192
PREFILL_ROWS = (1, 8)  # in so many prompts


def cases(has_adapters: bool) -> list[Case]:
    """Those of the base model first, so that a server with LoRA has computed no more before them than one without."""
    sizes = (1, 8, 32, 64, 128)
    base = [Case(rows, 0) for rows in sizes]
    others = [Case(rows, count) for rows in sizes for count in (1, 8, 32) if count <= rows]
    return base + [*others, Case(32, 32, "mixed")] * has_adapters


class Bench:
    def __init__(
        self,
        model: Path,
        adapters: Path,
        num_pages: int,
        bytes_of_page: int,
        device: str = "cuda",
        max_batch_tokens: int = PREFILL_TOKENS,
        max_total_tokens: int = PREFILL_TOKENS + 16,
    ) -> None:
        started = time.monotonic()
        sections = {
            "model": {"id": str(model), "max_total_tokens": max_total_tokens},
            "device": device,
            "adapters": {"gpu_bytes": num_pages * bytes_of_page, "host_bytes": "40GiB"},
            "scheduler": {"max_batch_tokens": max_batch_tokens},
        }
        args = ServerArgs.model_validate(sections)
        self.group = LocalGroup(rank_spec(args, model))
        self.report = self.group.load()[0]
        self.engine = start_engine(args, self.group, [self.report], (), self.fail)
        self.ready_s = time.monotonic() - started
        self.files = AdapterFiles([adapters], self.report.lora_shapes)
        self.socket, self.address = bind(zmq.PULL, "127.0.0.1")
        self._num_runs = 0

    def fail(self, reason: str) -> None:
        raise RuntimeError(reason)

    def generate(self, adapters: list[str], num_rows: int, num_prompt: int, num_new: int) -> float:
        """Seconds until all are through. They come at once, as the peer's script hands them over: the engine is held until they are there.
        Prompts are new every time, so that none is found in the prefix cache."""
        self._num_runs += 1
        numbers = random.Random(self._num_runs)
        found = [self.files.find(name) for name in adapters]
        requests = [
            GenerationRequest(
                request_id=str(row),
                prompt_ids=[numbers.randrange(100, 30000) for _ in range(num_prompt)],
                max_new_tokens=num_new,
                sampling=Sampling(),
                ignore_eos=True,
            )
            for row in range(num_rows)
        ]
        is_there = threading.Event()
        started = time.perf_counter()
        self.engine.call(lambda tiers: is_there.wait())
        for row, request in enumerate(requests):
            self.engine.submit(request, found[row % len(found)] if found else None, self.address, lambda ending: None)
        is_there.set()
        num_open = num_rows
        while num_open:
            for event in msgspec.msgpack.decode(self.socket.recv(), type=list[TokenEvent]):
                assert not event.error, event.message
                num_open -= event.is_last
        return time.perf_counter() - started

    def step_ms(self, case: Case) -> float:
        self.generate(case.names, case.rows, NUM_PROMPT, SHORT)
        short = min(self.generate(case.names, case.rows, NUM_PROMPT, SHORT) for _ in range(3))
        long = min(self.generate(case.names, case.rows, NUM_PROMPT, LONG) for _ in range(2))
        return (long - short) / (LONG - SHORT) * 1000

    def prefill_ms(self, names: list[str], num_rows: int) -> float:
        """Of 8,192 tokens in so many prompts."""
        size = PREFILL_TOKENS // num_rows
        return 1000 * min(self.generate(names, num_rows, size, 1) for _ in range(10))

    def stop(self) -> None:
        self.group.stop()


def page_bytes() -> int:
    """Of 8 ranks over all linears, in two bytes each."""
    return 8 * 2 * NUM_LAYERS * sum(inputs + outputs for inputs, outputs in LINEARS.values())


def measure(folder: Path, has_adapters: bool) -> list[dict[str, object]]:
    model, adapters = folder / "model", folder / "adapters"
    bench = Bench(model, adapters, POOL_PAGES if has_adapters else 0, page_bytes())
    results: list[dict[str, object]] = []

    def note(**fields: object) -> None:
        results.append({"lora": has_adapters, **fields})
        print(json.dumps(results[-1]), flush=True)

    note(ready_s=round(bench.ready_s, 1), weights_s=round(bench.report.load_seconds, 1), attention=bench.report.attention)
    for case in cases(has_adapters):
        note(rows=case.rows, adapters=case.adapters, ranks=case.ranks, step_ms=round(bench.step_ms(case), 3))
    for rows in PREFILL_ROWS:
        note(prefill_rows=rows, adapters=0, ms=round(bench.prefill_ms([], rows), 1))
        if has_adapters:
            note(prefill_rows=rows, adapters=rows, ms=round(bench.prefill_ms(Case(rows, rows).names, rows), 1))
    bench.stop()
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm/loray"))
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    make(arguments.folder)
    report = environment("python -m benchmarks.gpu_decode --out FILE")
    report["results"] = [result for has_adapters in (False, True) for result in measure(arguments.folder, has_adapters)]
    if arguments.out:
        arguments.out.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
