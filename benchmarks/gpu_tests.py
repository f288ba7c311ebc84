"""Every test that needs a GPU, and compute-sanitizer over our kernels in those of them: `python -m benchmarks.gpu_tests --out FILE`

Tests of kernels (once under the sanitizer's memcheck) and of models run side by side, in processes of some dozens of tests each; those of
the server, which takes most of the GPU's memory, alone. Parts that FILE has are not run again. Exits with 1 if a test failed or the
sanitizer found something.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from benchmarks.environment import environment

PARTS = ["sanitizer", "models", "server", "kernels"]
HERE = Path(__file__).parents[1]
PYTEST = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "-m", "gpu", "--timeout=0"]
SANITIZER = ["compute-sanitizer", "--tool", "memcheck", "--kernel-regex", "kns=_kernel", "--error-exitcode", "7"]
UNCACHED = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}  # else what lies behind a tensor may be read unnoticed: it belongs to the process
SUMMARY = re.compile(r"ERROR SUMMARY: (\d+) error")
CAPTURES = "graph"  # in the name of a test
TESTS_AT_ONCE = {"tests/kernels": 30, "tests/models": 12}  # in a process


def collected(folder: str) -> list[list[str]]:
    """The tests for each process. Those that capture graphs, which takes PyTorch's caching, have their own."""
    listing = subprocess.run([*PYTEST, "--collect-only", folder], capture_output=True, text=True, cwd=HERE, check=True).stdout
    tests = [line for line in listing.splitlines() if "::" in line]
    kinds = [test for test in tests if CAPTURES not in test], [test for test in tests if CAPTURES in test]
    at_once = TESTS_AT_ONCE[folder]
    return [kind[i : i + at_once] for kind in kinds for i in range(0, len(kind), at_once)]


def run_tests(tests: Sequence[str], prefix: Sequence[str] = ()) -> Counter[str]:
    """passed, failed and skipped; with the sanitizer also its errors."""
    with tempfile.TemporaryDirectory() as folder:
        report, names = Path(folder, "report.xml"), Path(folder, "tests")
        names.write_text("\n".join(tests))
        command = [*prefix, *PYTEST, f"--junitxml={report}", f"@{names}"]
        variables = os.environ | (UNCACHED if prefix and CAPTURES not in tests[0] else {})
        ended = subprocess.run(command, capture_output=True, text=True, cwd=HERE, check=False, env=variables)
        counts = _counts(report) if report.exists() else Counter(failed=len(tests))
    if prefix:
        summary = SUMMARY.search(ended.stdout)
        counts["sanitizer_errors"] = int(summary[1]) if summary else 1
    if ended.returncode:
        counts["failed"] += not counts["failed"] + counts["sanitizer_errors"]  # it says so, but not in its report
        print(ended.stdout[-6000:], ended.stderr[-2000:], flush=True)
    print(tests[0], "…", dict(counts), flush=True)
    return counts


def _counts(report: Path) -> Counter[str]:
    suite = ElementTree.parse(report).getroot()[0]
    total, skipped = int(suite.get("tests", 0)), int(suite.get("skipped", 0))
    failed = int(suite.get("failures", 0)) + int(suite.get("errors", 0))
    return Counter(passed=total - skipped - failed, failed=failed, skipped=skipped)


def run_all(groups: list[list[str]], processes: int, prefix: Sequence[str] = ()) -> dict[str, Any]:
    started = time.perf_counter()
    with ThreadPoolExecutor(processes) as pool:
        counts = sum(pool.map(lambda tests: run_tests(tests, prefix), groups), Counter[str]())
    names = "passed", "failed", "skipped", *(["sanitizer_errors"] if prefix else [])
    return {name: counts[name] for name in names} | {"seconds": round(time.perf_counter() - started)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--commit", default="", help="what is tested")
    parser.add_argument("--processes", type=int, default=14, help="side by side")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    options = parser.parse_args()
    report = json.loads(options.out.read_text()) if options.out.exists() else environment("python -m benchmarks.gpu_tests --out FILE")
    parts: dict[str, Callable[[], dict[str, Any]]] = {
        "sanitizer": lambda: run_all(collected("tests/kernels"), options.processes, SANITIZER),
        "models": lambda: run_all(collected("tests/models"), options.processes),
        "server": lambda: run_all([["tests/e2e/test_gpu.py"]], processes=1),
        "kernels": lambda: run_all(collected("tests/kernels"), options.processes),
    }
    for name in options.parts:
        if name not in report:
            report[name] = {"commit": options.commit, **parts[name]()}
            options.out.write_text(json.dumps(report, indent=2) + "\n")
        print(name, report[name], flush=True)
    sys.exit(any(report[name]["failed"] or report[name].get("sanitizer_errors") for name in options.parts))


if __name__ == "__main__":
    main()
