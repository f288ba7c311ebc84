"""The engine alone, without HTTP and Serve: scheduler, step channel, rank processes. `python -m benchmarks.loray_engine MODEL ADAPTERS`"""

import json
import sys
import time
from pathlib import Path

import msgspec
import ray
import zmq
from transformers import AutoTokenizer

from benchmarks.workload import CASES, NEW_TOKENS, Arrivals, Case
from loray.cluster.channel import bind
from loray.cluster.group import RankGroup
from loray.cluster.placement import bundles
from loray.deployments.adapter_files import AdapterFiles
from loray.deployments.config import ServerArgs
from loray.deployments.driver import rank_spec, start_engine
from loray.deployments.request import GenerationRequest, TokenEvent
from loray.models.step import Sampling


class Bench:
    def __init__(self, model: Path, adapters: Path) -> None:
        args = ServerArgs.model_validate({"model": {"id": str(model)}, "device": "cpu"})
        placement = ray.util.placement_group(bundles(1, "cpu"))
        ray.get(placement.ready())
        self.group = RankGroup(rank_spec(args, model), placement, self.fail)
        reports = self.group.load()
        self.engine = start_engine(args, self.group, reports, (), self.fail)
        self.files = AdapterFiles([adapters], reports[0].lora_shapes)
        self.tokenizer = AutoTokenizer.from_pretrained(model)
        self.socket, self.address = bind(zmq.PULL, "127.0.0.1")

    def fail(self, reason: str) -> None:
        raise RuntimeError(reason)

    def run(self, case: Case, num_tokens: int, label: str) -> Arrivals:
        """`label` keeps runs apart in the prefix cache: every run computes its prompts."""
        arrivals = Arrivals(time.perf_counter(), [[] for _ in range(case.num_requests)])
        for i, (prompt, name) in enumerate(zip(case.prompts, case.adapter_names, strict=True)):
            request = GenerationRequest(
                request_id=str(i), prompt_ids=self.tokenizer(label + prompt)["input_ids"], max_new_tokens=num_tokens, sampling=Sampling()
            )
            self.engine.submit(request, self.files.find(name) if name else None, self.address, lambda ending: None)
        num_open = case.num_requests
        while num_open:
            for event in msgspec.msgpack.decode(self.socket.recv(), type=list[TokenEvent]):
                arrivals.times[int(event.request_id)] += [time.perf_counter()] * len(event.token_ids)
                num_open -= event.is_last
        return arrivals


def main(model: Path, adapters: Path) -> None:
    ray.init(address="local", include_dashboard=False, num_cpus=4, log_to_driver=False)
    bench = Bench(model, adapters)
    for case in CASES:
        bench.run(case, 4, "Warm up. ")
        print(json.dumps({"case": case.name, **bench.run(case, NEW_TOKENS, "").summary()}), flush=True)
    status = Path(f"/proc/{bench.group.pids[0]}/status").read_text().splitlines()
    peak_kb = next(int(line.split()[1]) for line in status if line.startswith("VmHWM"))
    print(json.dumps({"case": "rank memory", "peak_mb": round(peak_kb / 1024)}), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
