"""loray beside vLLM on one GPU: `python -m benchmarks.h200 --vllm SCRIPT`, into benchmarks/results/h200.json

SCRIPT is a script that is called as `SCRIPT MAX_LORAS RANK OUT.json` and writes a list of {bs, adapters, tpot_ms}: decode steps of vLLM
on the shape that gpu_decode.py has. Without one loray runs alone. Each part's results lie under --folder as soon as they are there, and a
run that is started again goes on after the last of them. A plot of both systems goes beside the results.
"""

import argparse
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.environment import commit, environment
from benchmarks.gpu_decode import PREFILL_ROWS
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
    "base on a LoRA server / LoRA off, 8 rows": "<= 1.01",
    "base on a LoRA server / LoRA off, 128 rows": "<= 1.01",
    "8,192 tokens in 8 prompts, adapters / base": "<= 1.10",
    "zipf / staying, tokens per second": ">= 0.9",
    "zipf / staying, p50 of the first token": "<= 2",
    "84 MB from host memory to the GPU, ms": "<= 5",
    "beside loads / without, p99 between tokens": "unchanged",
    "start to ready, s": "<= 60",
    "http / engine": ">= 0.9",
    "http / engine, as shipped": ">= 0.9",
}
Steps = dict[tuple[int, int], float]  # (rows, adapters) -> milliseconds a step


class Parts:
    """Runs each part of the whole in a process of its own, unless its results are there from a run of the same commit that was cut."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / f"parts-{commit()}"
        self._may_reuse = commit() != "" and not commit().endswith("-dirty")
        self._folder.mkdir(parents=True, exist_ok=True)

    def run(self, name: str, *command: str, **variables: str) -> Any:
        """`command` writes its results into the file that is its last argument. variables: more for its environment."""
        out = self._folder / f"{name}.json"
        if not out.exists() or not self._may_reuse:
            print(f"--- {name}", flush=True)
            subprocess.run([sys.executable, *command, str(out)], check=True, env=os.environ | variables)
        return json.loads(out.read_text())


def run_vllm(parts: Parts, script: Path, adapters: Path) -> list[dict[str, Any]]:
    decode = [parts.run(f"vllm-decode-{n}", str(script), str(n), str(RANK)) for n in (0, 8, 32)]
    prefill = "-m", "benchmarks.peer_vllm_prefill"
    return [
        *itertools.chain.from_iterable(decode),
        *parts.run("vllm-prefill", *prefill),
        *parts.run("vllm-prefill-lora", *prefill, str(adapters)),
    ]


def steps_of(results: list[dict[str, Any]], has_lora: bool) -> Steps:
    return {(r["rows"], r["adapters"]): r["step_ms"] for r in results if "step_ms" in r and r["lora"] == has_lora and r["ranks"] == "r16"}


def vllm_steps(results: list[dict[str, Any]]) -> Steps:
    """The best that vLLM did with room for none, 8 or 32 adapters."""
    steps: Steps = {}
    for r in (r for r in results if "tpot_ms" in r):
        key = r["bs"], r["adapters"]
        steps[key] = min(steps.get(key, r["tpot_ms"]), r["tpot_ms"])
    return steps


def prefills(results: list[dict[str, Any]]) -> dict[tuple[int, int], float]:
    """(prompts, adapters) -> milliseconds: of the base without LoRA on the server, of the adapters with it."""
    return {(r["prefill_rows"], r["adapters"]): r["ms"] for r in results if "ms" in r and r["lora"] == bool(r["adapters"])}


def ratios(results: list[dict[str, Any]], peer_results: list[dict[str, Any]]) -> dict[str, float]:
    off, on = steps_of(results, False), steps_of(results, True)
    mixed = next(r["step_ms"] for r in results if r.get("ranks") == "mixed")
    found = {f"base, {rows} rows, ms": off[rows, 0] for rows in (8, 32, 128)}
    found["start to ready, s"] = max(r["ready_s"] for r in results if "ready_s" in r)
    found["8 adapters / base"] = on[32, 8] / off[32, 0]
    found["8 adapters / base on the same server"] = on[32, 8] / on[32, 0]
    found["32 adapters / base"] = on[32, 32] / off[32, 0]
    found["32 of ranks 8 to 64 / base"] = mixed / off[32, 0]
    found["base on a LoRA server / LoRA off"] = on[32, 0] / off[32, 0]
    found |= {f"base on a LoRA server / LoRA off, {rows} rows": on[rows, 0] / off[rows, 0] for rows in (8, 128)}
    ours_prefill, peer_prefill = prefills(results), prefills(peer_results)
    for rows in PREFILL_ROWS:
        found[f"8,192 tokens in {rows} prompts, adapters / base"] = ours_prefill[rows, rows] / ours_prefill[rows, 0]
    for (rows, adapters), milliseconds in peer_prefill.items():
        found[f"vLLM / loray, 8,192 tokens in {rows} prompts, {adapters} adapters"] = milliseconds / ours_prefill[rows, adapters]
    for (rows, adapters), milliseconds in vllm_steps(peer_results).items():
        ours = off if not adapters else on
        if (rows, adapters) in ours:
            found[f"vLLM / loray, {rows} rows, {adapters} adapters"] = milliseconds / ours[rows, adapters]
    return {name: round(value, 3) for name, value in found.items()}


def draw(ours: Steps, peer: Steps) -> str:
    def points(steps: Steps) -> list[tuple[float, float]]:
        return [(adapters, milliseconds) for (rows, adapters), milliseconds in sorted(steps.items()) if rows == PLOTTED_ROWS]

    lines = [Line("loray", "#0b6e4f", points(ours), is_labelled_below=True), *([Line("vLLM", "#b23a48", points(peer))] if peer else [])]
    return plot(lines, f"A decode step of {PLOTTED_ROWS} rows, Llama-3.1-8B's shape, bfloat16", "adapters of rank 16 in the batch", "ms")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--vllm", type=Path, help="the peer's script")
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm/loray"))
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    parts, folder = Parts(options.folder), ["--folder", str(options.folder)]
    results = parts.run("decode", "-m", "benchmarks.gpu_decode", *folder, "--out")["results"]
    peer_results = run_vllm(parts, options.vllm, options.folder / "adapters") if options.vllm else []
    zipf = parts.run("zipf", "-m", "benchmarks.gpu_zipf", *folder, "--out")
    serve = "-m", "benchmarks.gpu_serve", *folder
    served = parts.run("serve", *serve, "--out", RAY_SERVE_ENABLE_HA_PROXY="1")
    served_as_shipped = parts.run("serve-as-shipped", *serve, "--min-ingresses", "1", "--out")
    as_shipped = {"http / engine, as shipped": served_as_shipped["http / engine"]}
    peer = vllm_steps(peer_results)
    report = environment("python -m benchmarks.h200" + (" --vllm SCRIPT" if options.vllm else ""), "vllm") | {
        "ratios": ratios(results, peer_results) | {name: value for name, value in (zipf | served | as_shipped).items() if name in TARGETS},
        "loray": results,
        "256 adapters through a pool for 32": zipf,
        "through HTTP": served,
        "through HTTP, as shipped": served_as_shipped,
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
