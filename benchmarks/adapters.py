"""`make bench-adapters`: many adapters, slow downloads and floods against the whole server, over HTTP.

Writes benchmarks/results/adapters.json. Says how fast and how fair, and of zipf whether the tokens are right.
"""

import argparse
import datetime
import json
import os
import shlex
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from benchmarks import adapters_download, adapters_fair, adapters_long, adapters_zipf
from benchmarks.adapters_server import Served, cluster
from benchmarks.cpu import machine
from benchmarks.environment import commit
from loray.models.checkpoint import resolve_model

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "adapters.json"
PARTS = ("zipf", "download", "fair", "long")
USUAL = PARTS[:-1]
TARGETS = {
    "zipf: tokens/s / eight that stay": ">= 0.9, load bandwidth apart",
    "zipf: the same with all in the pool": "(no loads at all)",
    "download: ITL p99 with / without, the better of two": "<= 1.1",
    "fair: TTFT p99 flooded / alone": "<= 2",
    "fair: (most - least) / mean tokens": "< 0.05",
}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m", help="a bundled name or a folder")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--dtype", default="auto", help="of the model; tokens can be checked in float32 only")
    parser.add_argument("--only", default=",".join(USUAL), help=f"parts, with commas between them: {', '.join(PARTS)}")
    parser.add_argument("--quick", action="store_true", help="a minute or two, to see that it runs; its numbers mean nothing")
    parser.add_argument("--num-adapters", type=int, default=1000)
    parser.add_argument("--num-requests", type=int, help="of zipf; 400, with --quick 60")
    parser.add_argument(
        "--check-s", type=float, default=120, help="zipf, long: seconds for asking PEFT whether tokens are right; needs --dtype float32"
    )
    parser.add_argument("--minutes", type=float, default=20, help="long: of traffic, at least")
    parser.add_argument("--prompt-tokens", type=int, default=256, help="fair: of every request")
    parser.add_argument(
        "--period", type=float, help="fair: seconds between two requests of a calm adapter; by default what the machine bears"
    )
    parser.add_argument("--rounds", type=int, default=6, help="fair: requests of each calm adapter, alone and beside the flood")
    parser.add_argument("--max-running", type=int, default=16, help="fair: the server's scheduler.max_running")
    parser.add_argument("--max-batch-tokens", type=int, default=32, help="fair: the server's scheduler.max_batch_tokens")
    parser.add_argument("--max-waiting", type=int, default=64, help="fair: the server's adapters.max_waiting")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    options.only = options.only.split(",")
    if unknown := set(options.only) - set(PARTS):
        parser.error(f"--only knows {', '.join(PARTS)}, not {', '.join(sorted(unknown))}")
    return options


def run_part(part: str, served: Served, url: str, root: Path, options: argparse.Namespace) -> tuple[dict[str, Any], dict[str, float]]:
    """What it measured, and its ratios."""
    print(f"{part} …", flush=True)
    is_quick = options.quick
    if part == "zipf":
        num_requests = options.num_requests or (60 if is_quick else 400)
        report = adapters_zipf.ZipfBench(served, url, root, options.num_adapters, num_requests, options.check_s).run()
        return report, adapters_zipf.ratios(report)
    if part == "long":
        seconds = 60 if is_quick else 60 * options.minutes
        return adapters_long.LongBench(served, url, root, options.num_adapters, seconds, options.check_s).run(), {}
    if part == "download":
        report = adapters_download.DownloadBench(served, url, root, slow_s=5 if is_quick else 30).run()
        return report, adapters_download.ratios(report)
    args = adapters_fair.FairArgs(
        prompt_tokens=options.prompt_tokens,
        period_s=options.period,
        rounds=2 if is_quick else options.rounds,
        equal_answers=10 if is_quick else 240,
        max_running=options.max_running,
        max_batch_tokens=options.max_batch_tokens,
        max_waiting=options.max_waiting,
    )
    report = adapters_fair.FairBench(served, url, root, args).run()
    return report, adapters_fair.ratios(report)


def failures(report: Any, path: str = "") -> list[str]:
    """Where requests were not answered whole."""
    if not isinstance(report, dict):
        return []
    own = [f"{path}: {report['errors']}"] if report.get("errors") else []
    return own + [failure for name, part in report.items() for failure in failures(part, f"{path}/{name}")]


def main() -> None:
    options = parse()
    served = Served(resolve_model(options.model), options.device, options.dtype)
    os.environ["RAY_AUTH_MODE"] = "disabled"  # a cluster of its own that nothing outside this machine can reach
    parts: dict[str, Any] = {}
    ratios: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = folder  # downloads of an earlier run would be there already
        with cluster() as url:
            for part in options.only:
                parts[part], found = run_part(part, served, url, Path(folder) / part, options)
                ratios |= {name: round(value, 3) for name, value in found.items()}
    report = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": shlex.join(["python", "-m", "benchmarks.adapters", *sys.argv[1:]]),
        "commit": commit(),
        "machine": machine(),
        "versions": {name: version(name) for name in ("loray", "torch", "ray", "transformers")},
        "model": served.model.name,
        "device": torch.cuda.get_device_name() if served.device == "cuda" else "cpu",
        "failures": failures(parts),
        "ratios": ratios,
        **parts,
    }
    options.out.parent.mkdir(exist_ok=True)
    options.out.write_text(json.dumps(report, indent=2) + "\n")
    for name, value in ratios.items():
        print(f"{name:<62}{value:>8.3f}  {TARGETS.get(name, '')}")
    if report["failures"]:
        sys.exit("requests failed: " + "; ".join(report["failures"]))
    print(f"written to {options.out}")


if __name__ == "__main__":
    main()
