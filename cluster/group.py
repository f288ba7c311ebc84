"""The ranks of one replica: started together, watched together, gone together. Never restarts a single rank."""

import threading
from collections.abc import Callable

import ray
from ray.util.placement_group import PlacementGroup

from loray.cluster.channel import StepSender
from loray.cluster.heartbeat import DriverHeartbeat
from loray.cluster.host_loads import HostReports
from loray.cluster.placement import rank_options
from loray.cluster.rank import Rank, RankSpec
from loray.models.step import LoadReport


class RankGroup:
    """Holds every rank's handle for life: a rank without a reference is ended by Ray."""

    def __init__(self, spec: RankSpec, placement: PlacementGroup, on_failure: Callable[[str], None]) -> None:
        self._on_failure = on_failure
        actor = ray.remote(Rank)
        self._ranks = [actor.options(**rank_options(placement, i, spec.device)).remote(i, spec) for i in range(spec.world_size)]
        node_ip = ray.util.get_node_ip_address()
        self.steps = StepSender(node_ip, spec.world_size)
        self.host_reports = HostReports(node_ip, spec.world_size)
        self._heartbeat = DriverHeartbeat(node_ip, spec.world_size, lambda rank: on_failure(f"rank {rank} is silent"))

    def load(self) -> list[LoadReport]:
        """Every rank reads its shard of the weights; all at once, since they meet in their process group."""
        master = ray.get(self._ranks[0].rendezvous.remote())
        return ray.get([rank.load.remote(master) for rank in self._ranks])

    def start(self, num_blocks: int, num_pages: int) -> int:
        """Make the pools and listen for steps. How many blocks there are. A rank that ends from now on, however it does, is a failure."""
        (num_blocks,) = set(ray.get([rank.allocate.remote(num_blocks, num_pages) for rank in self._ranks]))
        self.pids = ray.get([rank.pid.remote() for rank in self._ranks])
        self._runs = [
            rank.run.remote(address, self._heartbeat.address, self.host_reports.address)
            for rank, address in zip(self._ranks, self.steps.addresses, strict=True)
        ]
        self._heartbeat.start()
        threading.Thread(target=self._watch, name="rank-watch", daemon=True).start()
        return num_blocks

    def _watch(self) -> None:
        """`run` never returns, so a finished reference is a dead or broken rank."""
        while True:
            done, _ = ray.wait(self._runs, num_returns=1, timeout=1.0)
            if done:
                rank = self._runs.index(done[0])
                try:
                    reason = str(ray.get(done[0]))
                except Exception as error:  # any way to end is a failure, and its text is the reason
                    reason = str(error)
                return self._on_failure(f"rank {rank} ended: {reason}")
