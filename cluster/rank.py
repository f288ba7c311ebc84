"""A Ray actor that owns one tensor-parallel rank: its shard of the weights, its KV blocks, its rank pages.

Ray calls set it up; after `run` it listens to the driver's steps alone, and never returns.
"""

import logging
import os
import socket
import threading
import time
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec
import ray

from loray.cluster.channel import Address, StepReceiver
from loray.cluster.heartbeat import start_rank_heartbeat
from loray.cluster.host_loads import HostLoader
from loray.models.launched import Launched
from loray.models.runner_sizes import RunnerOptions, RunnerSizes
from loray.models.step import LoadReport

if TYPE_CHECKING:  # imported when a rank loads: the driver, which makes ranks, has no use for torch
    import torch

    from loray.models.causal_lm import CausalLMRunner
    from loray.models.runner import Runner

logger = logging.getLogger("loray.rank")

READ_AHEAD_S, READ_AT_LAST_S = 10.0, 60.0  # after the start, at the earliest and at the latest
QUIET_S = 2.0  # without a step, before anything is read ahead


class RankSpec(msgspec.Struct, frozen=True):
    """What every rank of a group is told alike."""

    model_path: str
    device: Literal["cpu", "cuda"]
    dtype: str
    world_size: int
    sizes: RunnerSizes
    memory_fraction: float
    has_float8_cache: bool = False
    implementation: Literal["native", "transformers"] = "native"
    trust_remote_code: bool = False
    quantization: str | None = None


class Rank:
    def __init__(self, rank: int, spec: RankSpec) -> None:
        logging.basicConfig(level=logging.INFO, format=f"%(asctime)s rank {rank}: %(message)s", force=True)
        self._num_threads = max(1, (os.cpu_count() or 1) // spec.world_size)
        # Both are read when torch is first imported. Threads wait by spinning; for long, they starve whatever shares these cores.
        os.environ.setdefault("GOMP_SPINCOUNT", "2000")
        if spec.device == "cpu":  # OpenBLAS never takes more than it finds here: by Ray's hand the CPUs that this actor asks for
            os.environ["OMP_NUM_THREADS"] = str(self._num_threads)
        self._rank = rank
        self._spec = spec
        self._last_step = 0.0

    def pid(self) -> int:
        return os.getpid()

    def rendezvous(self) -> tuple[str, int]:
        """A free port on this node, where the ranks' collectives meet."""
        node_ip = ray.util.get_node_ip_address()
        with socket.create_server((node_ip, 0)) as server:
            return node_ip, server.getsockname()[1]

    def load(self, master: tuple[str, int]) -> LoadReport:
        import torch

        spec = self._spec
        if spec.device == "cpu":
            torch.set_num_threads(self._num_threads)
        device = torch.device("cuda", 0) if spec.device == "cuda" else torch.device("cpu")
        self._runner = self._native_runner(master, device) if spec.implementation == "native" else self._hosted_runner(device)
        return self._runner.report(spec.memory_fraction)

    def _native_runner(self, master: tuple[str, int], device: "torch.device") -> "Runner":
        import torch

        from loray.models.parallel import init_parallel
        from loray.models.runner import Runner

        spec = self._spec
        parallel = init_parallel(self._rank, spec.world_size, master[0], master[1], device)
        dtype = getattr(torch, spec.dtype)
        options = RunnerOptions(spec.trust_remote_code, spec.has_float8_cache, spec.quantization == "fp8")
        return Runner(Path(spec.model_path), parallel, device, dtype, spec.sizes, options)

    def _hosted_runner(self, device: "torch.device") -> "CausalLMRunner":
        import torch

        from loray.models.causal_lm import CausalLMRunner
        from loray.models.hosted_model import HostedOptions

        spec = self._spec
        assert spec.world_size == 1, "a model that transformers runs has one rank"
        options = HostedOptions(spec.trust_remote_code, spec.quantization)
        dtype = getattr(torch, spec.dtype)
        return CausalLMRunner(Path(spec.model_path), device, dtype, spec.sizes, options)

    def allocate(self, num_blocks: int, num_pages: int) -> int:
        """How many blocks it came to."""
        return self._runner.allocate(num_blocks, num_pages)

    def run(self, steps: Address, heartbeat: Address, host_reports: Address) -> None:
        """Execute steps until the driver is gone."""
        receiver = StepReceiver(steps)
        loader = HostLoader(self._runner.host_adapters, self._runner.grammars.compiled, host_reports, self._rank)
        start_rank_heartbeat(heartbeat, self._rank, self._exit)
        threading.Thread(target=self._read_ahead, name="read-ahead", daemon=True).start()
        launched: deque[Launched] = deque()  # at most two: the results of one are fetched while the next runs
        while True:
            step = receiver.receive(until=(lambda: launched[0].is_done) if launched else None)
            if step is not None:
                self._last_step = time.monotonic()
                loader.prepare(step)
                while launched and self._runner.waits_for(step):
                    self._reply(receiver, launched.popleft())
                launched.append(self._runner.launch(step))
                loader.drop(step)
            while launched and (len(launched) > 1 or launched[0].is_done):
                self._reply(receiver, launched.popleft())

    def _reply(self, receiver: StepReceiver, launched: Launched) -> None:
        result = launched.result()
        if self._rank == 0:
            receiver.reply(result)

    def _read_ahead(self) -> None:
        """What the first grammar needs and takes seconds to read, when nobody waits for a token: those of all would come late."""
        latest = time.monotonic() + READ_AT_LAST_S
        time.sleep(READ_AHEAD_S)
        while time.monotonic() < min(latest, self._last_step + QUIET_S):
            time.sleep(QUIET_S / 2)
        try:
            self._runner.grammars.compiled.vocabulary()
        except Exception as error:  # those who ask for a grammar are told
            logger.warning("structured output can't be served: %s", error)

    def _exit(self) -> None:
        logger.error("the driver is silent; exiting")
        os._exit(1)
