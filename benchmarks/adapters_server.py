"""The application on a Ray cluster of its own, and a look at that cluster's processes. Sends no requests."""

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import ray
from ray import serve

from benchmarks.memory_watch import SAMPLE_S, MemoryWatch
from loray.deployments.app import build
from loray.deployments.config import ServerArgs
from loray.deployments.serve_transport import choose_grpc

APP = "loray"
ADMIN_KEY = "benchmark"


@contextmanager
def cluster() -> Iterator[str]:
    """Its HTTP address."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = int(probe.getsockname()[1])
    choose_grpc()
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


def cluster_processes() -> Iterator[tuple[psutil.Process, str]]:
    """Those that belong to the server, with their titles."""
    for process in psutil.Process(os.getpid()).children(recursive=True):
        with suppress(psutil.Error):  # it has ended meanwhile
            title = (process.cmdline() or [""])[0].rpartition("/")[2].partition(".")[0].strip()  # an actor's has its method after a dot
            if title in ("raylet", "gcs_server") or (title.startswith("ray::") and title != "ray::IDLE"):
                yield process, title


@asynccontextmanager
async def watching(watch: MemoryWatch, stats: Callable[[], Awaitable[Mapping[str, float]]]) -> AsyncIterator[None]:
    """Sampled every few seconds. stats: the driver's numbers."""

    async def sample() -> None:
        await asyncio.to_thread(watch.sample, await stats())

    async def run() -> None:
        while True:
            await sample()
            await asyncio.sleep(SAMPLE_S)

    task = asyncio.create_task(run())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await sample()
