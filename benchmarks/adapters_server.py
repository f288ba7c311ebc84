"""The application on a Ray cluster of its own, and the memory of that cluster's processes. Sends no requests."""

import asyncio
import os
import socket
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil
import ray
from ray import serve

from loray.deployments.app import build
from loray.deployments.config import ServerArgs

APP = "loray"
ADMIN_KEY = "benchmark"
SAMPLE_S = 5.0
SETTLE_S = 60.0  # memory may grow for so long: pools and caches fill
MIB = 1 << 20


@contextmanager
def cluster() -> Iterator[str]:
    """Its HTTP address."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = int(probe.getsockname()[1])
    ray.init(address="local", include_dashboard=False, num_cpus=8, log_to_driver=False)
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        serve.shutdown()
        ray.shutdown()


class Served(NamedTuple):
    """What is measured, and where."""

    model: Path
    device: str  # "cpu" | "cuda"
    dtype: str  # "auto" | "float32" | …

    @property
    def is_float32(self) -> bool:
        return self.dtype == "float32" or (self.dtype == "auto" and self.device == "cpu")


@contextmanager
def serving(served: Served, **sections: dict[str, Any]) -> Iterator[None]:
    """One ingress: another that is started while something is measured takes the cores away from it."""
    args = {
        "model": {"id": str(served.model), "dtype": served.dtype},
        "device": served.device,
        "ingress": {"min_replicas": 1, "max_replicas": 1},
        "api_keys": {"admin": ADMIN_KEY},
        **sections,
    }
    serve.run(build(ServerArgs.model_validate(args)), name=APP, route_prefix="/")
    try:
        yield
    finally:
        serve.delete(APP)


class MemoryWatch:
    """What each process of the cluster holds for itself alone (USS), every few seconds."""

    def __init__(self) -> None:
        self._titles: dict[int, str] = {}  # by process id
        self._samples: dict[int, list[tuple[float, float]]] = {}  # seconds since the first, MiB
        self._started = time.monotonic()

    def sample(self) -> None:
        for process in psutil.Process(os.getpid()).children(recursive=True):
            try:
                title = (process.cmdline() or [""])[0].rpartition("/")[2].partition(".")[0].strip()  # an actor's has its method after a dot
                if title in ("raylet", "gcs_server") or (title.startswith("ray::") and title != "ray::IDLE"):
                    num_bytes = process.memory_full_info().uss
                    self._titles[process.pid] = title
                    self._samples.setdefault(process.pid, []).append((time.monotonic() - self._started, num_bytes / MIB))
            except psutil.Error:  # it has ended meanwhile
                continue

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        async def run() -> None:
            while True:
                await asyncio.to_thread(self.sample)
                await asyncio.sleep(SAMPLE_S)

        self._started = time.monotonic()
        task = asyncio.create_task(run())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            self.sample()

    def summary(self) -> list[dict[str, Any]]:
        """From the first minute on, or from the middle of a shorter time. The slope is that of a straight line through the samples."""
        settle_s = min(SETTLE_S, (time.monotonic() - self._started) / 2)
        found = []
        for pid, samples in self._samples.items():
            if len(samples) < 2:
                continue
            settled = samples[min(sum(at < settle_s for at, _ in samples), len(samples) - 2) :]
            slope = float(np.polyfit([at / 60 for at, _ in settled], [mib for _, mib in settled], 1)[0])
            found.append(
                {
                    "process": self._titles[pid],
                    "first_mib": round(samples[0][1], 1),
                    "settled_mib": round(settled[0][1], 1),
                    "last_mib": round(settled[-1][1], 1),
                    "mib_per_minute": round(slope, 2),
                    "settled_after_s": round(settled[0][0]),
                    "seconds": round(settled[-1][0]),
                }
            )
        return sorted(found, key=lambda one: -one["last_mib"])
