"""The whole server, streamed over HTTP: `python -m benchmarks.loray_http MODEL ADAPTERS`."""

import asyncio
import json
import sys
import time
from pathlib import Path

import httpx
import ray
from ray import serve

from benchmarks.workload import CASES, NEW_TOKENS, Arrivals, Case
from loray.deployments.app import build
from loray.deployments.config import ServerArgs
from loray.deployments.serve_transport import choose_grpc

PORT = 8321


async def stream(client: httpx.AsyncClient, prompt: str, adapter_id: str, num_tokens: int, times: list[float]) -> None:
    parameters = {"max_new_tokens": num_tokens, "ignore_eos_token": True, "adapter_id": adapter_id}
    url = f"http://127.0.0.1:{PORT}/generate_stream"
    async with client.stream("POST", url, json={"inputs": prompt, "parameters": parameters}) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if line:
                times.append(time.perf_counter())


async def run(case: Case, num_tokens: int, label: str) -> Arrivals:
    async with httpx.AsyncClient(timeout=600) as client:
        arrivals = Arrivals(time.perf_counter(), [[] for _ in range(case.num_requests)])
        requests = zip(case.prompts, case.adapter_names, arrivals.times, strict=True)
        await asyncio.gather(*(stream(client, label + prompt, name, num_tokens, times) for prompt, name, times in requests))
    return arrivals


def main(model: Path, adapters: Path) -> None:
    choose_grpc()
    ray.init(address="local", include_dashboard=False, num_cpus=4, log_to_driver=False)
    serve.start(http_options={"host": "127.0.0.1", "port": PORT})
    args = {"model": {"id": str(model)}, "device": "cpu", "adapters": {"local_roots": [str(adapters)]}}
    serve.run(build(ServerArgs.model_validate(args)), name="loray", route_prefix="/")
    for case in CASES:
        asyncio.run(run(case, 4, "Warm up. "))
        print(json.dumps({"case": case.name, **asyncio.run(run(case, NEW_TOKENS, "")).summary()}), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
