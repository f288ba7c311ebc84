"""What each replica of an application holds by itself. Ingresses come and go with the traffic."""

import re
import time

import psutil
from ray import serve

from tests.e2e.conftest import App
from tests.e2e.patience import PATIENCE_S


def adapter_series(app: App) -> set[str]:
    """Of all running ingresses, without the ingress's name: a scrape tells of the one that it reaches."""
    lines: dict[str, list[str]] = {}
    deadline = time.monotonic() + PATIENCE_S
    while len(lines) < num_ingresses(app.name):
        assert time.monotonic() < deadline, f"of the ingresses only {lines.keys()} answered"
        text = app.get("/metrics").text
        [name] = set(re.findall(r'^loray_requests_total\{.*replica="(\w+)"', text, re.MULTILINE))
        lines[name] = [line.replace(name, "") for line in text.splitlines() if line.startswith("loray_adapter")]
    return {line.rpartition(" ")[0] for one in lines.values() for line in one}


def num_ingresses(app_name: str) -> int:
    return serve.status().applications[app_name].deployments["Ingress"].replica_states.get("RUNNING", 0)


def opened(app_name: str) -> dict[str, int]:
    """Threads and open files of each replica."""
    counts = {}
    for process in psutil.Process().children(recursive=True):
        for deployment in ("Driver", "Ingress"):
            if f"ServeReplica:{app_name}:{deployment}" in " ".join(process.cmdline()):
                name = f"{deployment} {process.pid}"
                counts |= {f"{name} threads": process.num_threads(), f"{name} files": process.num_fds()}
    return counts
