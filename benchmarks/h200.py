"""loray beside vLLM on one GPU, in one run: `python -m benchmarks.h200 --vllm SCRIPT`, into benchmarks/results/h200.json

SCRIPT is a script that is called as `SCRIPT MAX_LORAS RANK OUT.json` and writes a list of {bs, adapters, tpot_ms}: decode steps of vLLM
on the shape that gpu_decode.py has. Without one loray runs alone. A plot of both goes beside the results.
"""

import argparse
import datetime
import json
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from benchmarks.svg_plot import Line, plot

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "h200.json"
RANK = 16
PLOTTED_ROWS = 32
TARGETS = {
    "base, 8 rows, ms": "<= 4.6",
    "base, 32 rows, ms": "<= 5.0",
    "base, 128 rows, ms": "<= 6.8",
    "8 adapters / base": "<= 1.08",
    "32 adapters / base": "<= 1.25",
    "32 of ranks 8 to 64 / base": "<= 1.45",
    "base on a LoRA server / LoRA off": "<= 1.01",
}
Steps = dict[tuple[int, int], float]  # (rows, adapters) -> milliseconds a step


def run_loray(folder: Path, out: Path) -> list[dict[str, Any]]:
    subprocess.run([sys.executable, "-m", "benchmarks.gpu_decode", "--folder", str(folder), "--out", str(out)], check=True)
    return json.loads(out.read_text())


def run_vllm(script: Path, folder: Path) -> list[dict[str, Any]]:
    found = []
    for max_loras in (0, 8, 32):
        out = folder / f"vllm-{max_loras}.json"
        subprocess.run([sys.executable, str(script), str(max_loras), str(RANK), str(out)], check=True)
        found += json.loads(out.read_text())
    return found


def steps_of(results: list[dict[str, Any]], has_lora: bool) -> Steps:
    return {(r["rows"], r["adapters"]): r["step_ms"] for r in results if "step_ms" in r and r["lora"] == has_lora and r["ranks"] == "r16"}


def vllm_steps(results: list[dict[str, Any]]) -> Steps:
    """The base model without LoRA, and each number of adapters with just so much room, as vLLM does best."""
    wanted = {0: 0, 1: 8, 8: 8, 32: 32}
    return {(r["bs"], r["adapters"]): r["tpot_ms"] for r in results if r["max_loras"] == wanted[r["adapters"]]}


def ratios(results: list[dict[str, Any]], peer: Steps) -> dict[str, float]:
    off, on = steps_of(results, False), steps_of(results, True)
    mixed = next(r["step_ms"] for r in results if r.get("ranks") == "mixed")
    found = {f"base, {rows} rows, ms": off[rows, 0] for rows in (8, 32, 128)}
    found["8 adapters / base"] = on[32, 8] / off[32, 0]
    found["32 adapters / base"] = on[32, 32] / off[32, 0]
    found["32 of ranks 8 to 64 / base"] = mixed / off[32, 0]
    found["base on a LoRA server / LoRA off"] = on[32, 0] / off[32, 0]
    for (rows, adapters), milliseconds in peer.items():
        ours = off if not adapters else on
        if (rows, adapters) in ours:
            found[f"vLLM / loray, {rows} rows, {adapters} adapters"] = milliseconds / ours[rows, adapters]
    return {name: round(value, 3) for name, value in found.items()}


def draw(ours: Steps, peer: Steps) -> str:
    def points(steps: Steps) -> list[tuple[float, float]]:
        return [(adapters, milliseconds) for (rows, adapters), milliseconds in sorted(steps.items()) if rows == PLOTTED_ROWS]

    lines = [Line("loray", "#0b6e4f", points(ours)), *([Line("vLLM", "#b23a48", points(peer))] if peer else [])]
    return plot(lines, f"A decode step of {PLOTTED_ROWS} rows, Llama-3.1-8B's shape, bfloat16", "adapters of rank 16 in the batch", "ms")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--vllm", type=Path, help="the peer's script")
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm/loray"))
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        results = run_loray(options.folder, Path(scratch) / "loray.json")
        peer_results = run_vllm(options.vllm, Path(scratch)) if options.vllm else []
    peer = vllm_steps(peer_results)
    report = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": "python -m benchmarks.h200" + (" --vllm SCRIPT" if options.vllm else ""),
        "gpu": torch.cuda.get_device_name(),
        "versions": {name: version(name) for name in ("torch", "triton", *(["vllm"] if options.vllm else []))},
        "ratios": ratios(results, peer),
        "loray": results,
        "vllm": peer_results,
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(report, indent=2) + "\n")
    ours = {key: value for key, value in steps_of(results, True).items() if key[1]} | {
        key: value for key, value in steps_of(results, False).items() if not key[1]
    }
    options.out.with_suffix(".svg").write_text(draw(ours, peer))
    for name, value in report["ratios"].items():
        print(f"{name:<44}{value:>8.3f}  {TARGETS.get(name, '')}")


if __name__ == "__main__":
    main()
