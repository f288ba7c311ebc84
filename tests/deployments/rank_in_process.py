"""A simulated rank that runs in the engine's own process, reads adapters when it is told to, and can be held back."""

import threading
from collections import deque
from collections.abc import Callable

import pytest

from loray.cluster.host_loads import Prepared
from loray.deployments.adapter_tiers import AdapterTiers
from loray.deployments.adapters import AdapterTable
from loray.deployments.block_pool import BlockPool
from loray.deployments.engine import Engine
from loray.deployments.host_tier import HostTier
from loray.deployments.queue_limits import QueueLimits
from loray.deployments.scheduler import Scheduler
from loray.models.step import HostCopy, Step, StepResult, grammar_key
from tests.deployments.simulated_rank import SimulatedRank

NUM_BLOCKS, BLOCK, NUM_PAGES = 32, 4, 4
PAGE_BYTES, HOST_BYTES = 100, 400


class RankInProcess:
    """Steps queue up and run when their result is asked for, like on a real rank; `gate` holds the rank back."""

    def __init__(self) -> None:
        self.rank = SimulatedRank(NUM_BLOCKS, BLOCK, NUM_PAGES)
        self.queue: deque[Step] = deque()
        self.woken = threading.Event()
        self.gate = threading.Event()
        self.gate.set()
        self.on_prepared: Callable[[Prepared], None] = lambda prepared: None
        self.slow_paths: set[str] = set()  # never read to the end, unless the test says so
        self.lost_paths: set[str] = set()  # cannot be read into host memory
        self.changed_paths: set[str] = set()  # of those, because the files are others
        self.prepared: list[HostCopy] = []
        self.compiled: list[bytes] = []
        self.slow_grammars: set[bytes] = set()  # never compiled to the end, unless the test says so
        self.dropped: list[HostCopy] = []
        self.is_paused = threading.Event()
        self._num_until_pause = 0

    def pause_after(self, num_steps: int) -> None:
        """Closes the gate by itself, and says so."""
        self._num_until_pause = num_steps

    def send(self, step: Step) -> None:
        self.queue.append(step)

    def wake(self) -> None:
        self.woken.set()

    def receive(self, timeout_ms: int) -> StepResult | None:
        if self.queue and self.gate.is_set():
            step = self.queue.popleft()
            result = self.rank.execute(step)
            self._num_until_pause -= 1
            if self._num_until_pause == 0:
                self.gate.clear()
                self.is_paused.set()
            self.dropped += step.drops
            for copy in step.prepares:
                if copy.path not in self.slow_paths:
                    self.prepare(copy)
            for grammar in step.grammars:
                self.compiled.append(grammar)
                if grammar not in self.slow_grammars:
                    self.compile(grammar)
            return result
        self.woken.wait(0.02 if self.queue else timeout_ms / 1000)
        self.woken.clear()
        return None

    def compile(self, grammar: bytes) -> None:
        self.on_prepared(Prepared(HostCopy("", ""), 1, 0.5, grammar=grammar_key(grammar)))

    def prepare(self, copy: HostCopy) -> None:
        self.prepared.append(copy)
        is_changed = copy.path in self.changed_paths
        error = "torn" if is_changed or copy.path in self.lost_paths else ""
        self.on_prepared(Prepared(copy, PAGE_BYTES, 0.5, error, is_changed=is_changed))


def start_engine(steps: RankInProcess, max_running: int = 8) -> Engine:
    tiers = AdapterTiers(AdapterTable(NUM_PAGES), HostTier(HOST_BYTES, PAGE_BYTES))
    scheduler = Scheduler(BlockPool(NUM_BLOCKS, BLOCK), tiers.table, max_batch_tokens=16, max_running=max_running)
    engine = Engine(scheduler, tiers, steps, eos_ids=[], limits=QueueLimits(3, 2))
    steps.on_prepared = engine.prepared
    engine.start(on_failure=lambda reason: pytest.fail(reason))
    return engine
