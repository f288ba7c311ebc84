"""One rank in a process of its own, without Ray: what `start_engine` needs of a group of ranks."""

import multiprocessing
import os
from multiprocessing.connection import Connection

from loray.cluster.channel import StepSender
from loray.cluster.heartbeat import DriverHeartbeat
from loray.cluster.host_loads import HostReports
from loray.cluster.rank import Rank, RankSpec
from loray.models.step import LoadReport

NODE_IP = "127.0.0.1"


class LocalGroup:
    def __init__(self, spec: RankSpec) -> None:
        assert spec.world_size == 1, "there is one process"
        self.steps = StepSender(NODE_IP, 1)
        self.host_reports = HostReports(NODE_IP, 1)
        self._is_stopped = False
        self._heartbeat = DriverHeartbeat(NODE_IP, 1, self._on_silence)
        context = multiprocessing.get_context("spawn")
        self._pipe, other = context.Pipe()
        self._process = context.Process(target=_run_rank, args=(spec, other), daemon=True)
        self._process.start()
        other.close()

    def load(self) -> list[LoadReport]:
        return [self._pipe.recv()]

    def start(self, num_blocks: int, num_pages: int) -> int:
        self._pipe.send((num_blocks, num_pages))
        num_blocks, pid = self._pipe.recv()
        self.pids = [pid]
        self._pipe.send((self.steps.addresses[0], self._heartbeat.address, self.host_reports.address))
        self._heartbeat.start()
        return int(num_blocks)

    def stop(self) -> None:
        self._is_stopped = True
        self._process.kill()
        self._process.join()

    def _on_silence(self, rank: int) -> None:
        if not self._is_stopped:
            os._exit(1)


def _run_rank(spec: RankSpec, pipe: Connection) -> None:
    rank = Rank(0, spec)
    pipe.send(rank.load(("", 0)))
    pipe.send((rank.allocate(*pipe.recv()), rank.pid()))
    rank.run(*pipe.recv())
