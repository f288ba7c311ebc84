"""vLLM's own server, streamed over HTTP: `python -m benchmarks.peer_vllm_http PYTHON MODEL ADAPTERS`, with its own Python."""

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

from benchmarks.workload import ADAPTER_SETS, CASES, NEW_TOKENS, Arrivals, Case

PORT = 8322
URL = f"http://127.0.0.1:{PORT}"
BASE = "base"
START_S = 300
SETTINGS = {"HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}  # as in peer_vllm.py


@contextmanager
def serving(python: str, model: Path, adapters: Path, set_name: str) -> Iterator[None]:
    """Slots are padded to the largest rank allowed, so each set of adapters has a server of its own."""
    ranks = ADAPTER_SETS[set_name]
    modules = [f"{set_name}-{i}={adapters / f'{set_name}-{i}'}" for i in range(len(ranks))]
    sizes = {"max-lora-rank": max(ranks), "max-loras": len(ranks), "max-model-len": 1024, "max-num-seqs": 32}
    command = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--served-model-name", BASE, "--dtype", "float32"]
    command += ["--host", "127.0.0.1", "--port", str(PORT), "--enforce-eager", "--enable-lora", "--lora-modules", *modules]
    command += [f"--{name}={value}" for name, value in sizes.items()]
    server = subprocess.Popen(command, stdout=sys.stderr, env=os.environ | SETTINGS)
    try:
        _wait(server)
        yield
    finally:
        server.terminate()
        server.wait()


def _wait(server: "subprocess.Popen[bytes]") -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and server.poll() is None:
        try:
            if httpx.get(f"{URL}/health").is_success:
                return
        except httpx.TransportError:
            pass  # not there yet
        time.sleep(1)
    sys.exit(f"vLLM's server ended with {server.returncode}" if server.poll() is not None else f"vLLM's server took more than {START_S} s")


async def stream(client: httpx.AsyncClient, prompt: str, model: str, num_tokens: int, times: list[float]) -> None:
    body = {"model": model, "prompt": prompt, "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True, "stream": True}
    async with client.stream("POST", f"{URL}/v1/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                times.append(time.perf_counter())
    assert len(times) == num_tokens, f"{len(times)} events for {num_tokens} tokens"


async def run(case: Case, num_tokens: int) -> Arrivals:
    async with httpx.AsyncClient(timeout=600) as client:
        arrivals = Arrivals(time.perf_counter(), [[] for _ in range(case.num_requests)])
        requests = zip(case.prompts, case.adapter_names, arrivals.times, strict=True)
        await asyncio.gather(*(stream(client, prompt, name or BASE, num_tokens, times) for prompt, name, times in requests))
    return arrivals


def main(python: str, model: Path, adapters: Path) -> None:
    for set_name in ADAPTER_SETS:
        with serving(python, model, adapters, set_name):
            for case in CASES:
                if case.adapters == set_name or (not case.adapters and set_name == "r16"):
                    asyncio.run(run(case, 4))
                    print(json.dumps({"case": case.name, **asyncio.run(run(case, NEW_TOKENS)).summary()}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
