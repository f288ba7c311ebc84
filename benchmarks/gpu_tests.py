"""Every test that needs a GPU, and compute-sanitizer over our kernels in those of them: `python -m benchmarks.gpu_tests --out FILE`

Files of tests/kernels run side by side, each in a process of its own, the others one after another. Exits with 1 if a test or the
sanitizer found something.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from benchmarks.environment import environment

HERE = Path(__file__).parents[1]
SANITIZER = ["compute-sanitizer", "--tool", "memcheck", "--kernel-regex", "kns=_kernel", "--error-exitcode", "7"]
SUMMARY = re.compile(r"ERROR SUMMARY: (\d+) error")
MARKED = re.compile(r"mark\.gpu|marks=ON_GPU")
NOTHING_COLLECTED = 5  # pytest's exit code


def run_file(file: Path, prefix: list[str]) -> Counter[str]:
    """passed, failed and skipped; with the sanitizer also its errors."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        pytest = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "-m", "gpu", "--timeout=0", f"--junitxml={report}", str(file)]
        ended = subprocess.run([*prefix, *pytest], capture_output=True, text=True, cwd=HERE, check=False)
        counts = Counter({"failed": 1}) if not report.exists() else _counts(report)
    if prefix:
        summary = SUMMARY.search(ended.stdout)
        counts["sanitizer_errors"] = int(summary[1]) if summary else 1
    if counts["failed"] or counts["sanitizer_errors"] or ended.returncode not in (0, NOTHING_COLLECTED):
        counts["failed"] += ended.returncode not in (0, NOTHING_COLLECTED) and not counts["failed"] + counts["sanitizer_errors"]
        print(ended.stdout[-6000:], ended.stderr[-2000:], flush=True)
    print(file.relative_to(HERE), dict(counts), flush=True)
    return counts


def _counts(report: Path) -> Counter[str]:
    suite = ElementTree.parse(report).getroot()[0]
    total, skipped = int(suite.get("tests", 0)), int(suite.get("skipped", 0))
    failed = int(suite.get("failures", 0)) + int(suite.get("errors", 0))
    return Counter(passed=total - skipped - failed, failed=failed, skipped=skipped)


def run_files(files: list[Path], prefix: list[str], at_once: int) -> dict[str, Any]:
    started = time.perf_counter()
    with ThreadPoolExecutor(at_once) as pool:
        counts = sum(pool.map(lambda file: run_file(file, prefix), files), Counter[str]())
    return {name: counts[name] for name in ("passed", "failed", "skipped", *(["sanitizer_errors"] if prefix else []))} | {
        "seconds": round(time.perf_counter() - started)
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--commit", default="", help="what is tested, for the head of the file")
    parser.add_argument("--at-once", type=int, default=8, help="files of tests/kernels")
    options = parser.parse_args()
    kernels = sorted((HERE / "tests/kernels").glob("test_*.py"))
    others = sorted(file for file in (HERE / "tests").rglob("test_*.py") if file not in kernels and MARKED.search(file.read_text()))
    report = environment("python -m benchmarks.gpu_tests --out FILE") | {"commit": options.commit}
    for name, files, prefix, at_once in (
        ("kernels", kernels, [], options.at_once),
        ("models and server", others, [], 1),
        ("kernels under compute-sanitizer memcheck", kernels, SANITIZER, options.at_once),
    ):
        report[name] = run_files(files, prefix, at_once)
        print(name, report[name], flush=True)
        options.out.write_text(json.dumps(report, indent=2) + "\n")
    sys.exit(any(part.get("failed") or part.get("sanitizer_errors") for part in report.values() if isinstance(part, dict)))


if __name__ == "__main__":
    main()
