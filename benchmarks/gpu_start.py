"""How long the whole application takes from nothing to its first answer on a GPU: `python -m benchmarks.gpu_start --out FILE`

Twice, each in a process of its own, with a Ray cluster of its own: with an empty cache of compiled kernels, and once more.
Llama-3.1-8B's shape, its weights in the folder before.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

STARTED = time.time()


def start_once(model: Path) -> dict[str, float]:
    """Seconds since this process began."""
    from benchmarks.adapters_server import Served, cluster, serving

    def now() -> float:
        return round(time.time() - STARTED, 1)

    told = {"imported": now()}
    with cluster() as url:
        told["Ray and Serve run"] = now()
        with serving(Served(model, "cuda", "auto"), ingress={"min_replicas": 1, "max_replicas": 4}):
            told["application ready"] = now()
            body = json.dumps({"inputs": "Hello", "parameters": {"max_new_tokens": 5}}).encode()
            request = urllib.request.Request(f"{url}/generate", body, {"Content-Type": "application/json"})
            urllib.request.urlopen(request, timeout=60).read()
            told["first answer"] = now()
    return told


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm/loray"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--once", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    os.environ["RAY_AUTH_MODE"] = "disabled"  # a cluster of its own that nothing outside this machine can reach
    if options.once:
        options.out.write_text(json.dumps(start_once(options.folder / "model")))
        return
    from benchmarks.environment import environment
    from benchmarks.llama_8b import make_model

    make_model(options.folder / "model")
    report = environment("python -m benchmarks.gpu_start --out FILE")
    with tempfile.TemporaryDirectory() as folder:
        variables = os.environ | {"XDG_CACHE_HOME": f"{folder}/cache", "TRITON_CACHE_DIR": f"{folder}/triton"}
        for turn in ("kernels not compiled", "again"):
            out = Path(folder, "told.json")
            command = [sys.executable, "-m", "benchmarks.gpu_start", "--once", "--folder", str(options.folder), "--out", str(out)]
            subprocess.run(command, check=True, env=variables)
            report[turn] = json.loads(out.read_text())
            print(turn, report[turn], flush=True)
    options.out.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
