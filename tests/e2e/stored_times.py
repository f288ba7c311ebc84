"""How long answers took, kept beside the benchmarks' results: no test may fail for a slow machine, but whoever reads them must see it."""

import datetime
import json
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

import numpy as np

from benchmarks.cpu import HERE, machine
from benchmarks.environment import commit


def spread(seconds: Sequence[float]) -> dict[str, float]:
    """Of answers."""
    half, most, slowest = (round(float(np.quantile(seconds, share)), 3) for share in (0.5, 0.99, 1))
    return {"answers": len(seconds), "p50_s": half, "p99_s": most, "slowest_s": slowest}


def store(name: str, command: str, times: dict[str, Any]) -> None:
    report = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": command,
        "commit": commit(),
        "machine": machine(),
        "versions": {package: version(package) for package in ("loray", "torch", "ray", "transformers")},
        **times,
    }
    (HERE / "results" / f"{name}.json").write_text(json.dumps(report, indent=2) + "\n")
