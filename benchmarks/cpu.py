"""`make bench`: loray beside its peers on this machine's CPU, one after another in one run, into benchmarks/results/cpu.json.

vLLM takes part if its environment is there: `make bench VLLM=<its python>`.
"""

import argparse
import datetime
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import timeit
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.workload import NEW_TOKENS, make_adapters
from loray.models.checkpoint import resolve_model

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "cpu.json"


def measure(name: str, command: list[str]) -> dict[str, dict[str, Any]]:
    """Case -> what the peer measured. A peer prints a JSON line a case; its chatter goes to stderr."""
    print(f"{name} …", flush=True)
    environment = os.environ | {"RAY_AUTH_MODE": "disabled", "PYTHONPATH": str(HERE.parent)}
    cases = {}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment, cwd=HERE.parent) as process:
        assert process.stdout
        for line in process.stdout:
            if line.startswith('{"case"'):
                result = json.loads(line)
                cases[result.pop("case")] = result
                print("  ", line.strip(), flush=True)
    if process.returncode:
        sys.exit(f"{name} failed with exit code {process.returncode}")
    return cases


def ratios(peers: dict[str, dict[str, dict[str, Any]]]) -> dict[str, float]:
    """The targets: loray over HTTP and its engine against `generate`, and against vLLM over HTTP and its engine."""

    def rate(peer: str, case: str) -> float:
        return float(peers[peer][case]["tokens_per_s"])

    found = {}
    for ours, vllm in (("loray engine", "vllm"), ("loray http", "vllm http")):
        found[f"{ours}: alone / transformers generate"] = rate(ours, "alone") / rate("transformers", "alone")
        for case in ("16 over 8 r16", "16 over 8 mixed"):
            found[f"{ours}: {case} / 16 base"] = rate(ours, case) / rate(ours, "16 base")
        for case in peers.get(vllm, ()):
            found[f"{ours}: {case} / {vllm}"] = rate(ours, case) / rate(vllm, case)
    return {name: round(value, 2) for name, value in found.items()}


def machine() -> dict[str, Any]:
    """Also how fast it is at this hour: a virtual one may be half as fast at another."""
    lines = subprocess.run(["lscpu"], capture_output=True, text=True, check=False).stdout.splitlines() if shutil.which("lscpu") else []
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("Model name")), platform.processor())
    speed = {"python_loop_ms": round(min(timeit.repeat("for _ in range(1_000_000): pass", number=1, repeat=10)) * 1000, 1)}
    return {"cpu": model, "architecture": platform.machine(), "cores": os.cpu_count(), "python": platform.python_version()} | speed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--vllm", default="", help="the python of an environment with vLLM; left out if it is not there")
    arguments = parser.parse_args()
    model = resolve_model("smollm2-135m")
    with tempfile.TemporaryDirectory() as folder:
        make_adapters(model, Path(folder))
        paths = [str(model), folder]
        peers = {"transformers": measure("transformers", [sys.executable, "-m", "benchmarks.peer_transformers", *paths])}
        if Path(arguments.vllm).is_file():
            peers["vllm"] = measure("vllm", [arguments.vllm, str(HERE / "peer_vllm.py"), *paths])
            peers["vllm http"] = measure("vllm http", [sys.executable, "-m", "benchmarks.peer_vllm_http", arguments.vllm, *paths])
        else:
            print("vllm: left out, no environment given (make bench VLLM=<its python>)")
        for ours in ("engine", "http"):
            peers[f"loray {ours}"] = measure(f"loray {ours}", [sys.executable, "-m", f"benchmarks.loray_{ours}", *paths])
    report = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": "make bench" + (" VLLM=<its python>" if "vllm" in peers else ""),
        "machine": machine(),
        "versions": {name: version(name) for name in ("loray", "torch", "ray", "transformers", "peft")},
        "workload": f"SmolLM2-135M, float32, greedy, {NEW_TOKENS} new tokens a request",
        "ratios": ratios(peers),
        "peers": peers,
    }
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps(report["ratios"], indent=2))
    print(f"written to {RESULTS.relative_to(HERE.parent)}")


if __name__ == "__main__":
    main()
