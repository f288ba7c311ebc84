"""Runs functions on every rank of a group, each in a thread. What the functions do is their own matter.

Sums and gathers go through loray's own Parallel; not in it is gloo's way between processes, which costs more than a tiny model.
"""

import os
import threading
import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from loray.models.parallel import Parallel
from tests.models.rank_processes import Job, RankError


class ThreadGroup:
    """Takes any number of jobs, one after another."""

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size

    def run(self, job: Job, *args: Any) -> list[Any]:
        """job(parallel, *args) of each rank, in their order; a rank's exception is raised here."""
        meeting = Meeting(self._world_size)
        answers: list[Any] = [None] * self._world_size

        def work(rank: int) -> None:
            answers[rank] = job(Parallel(rank, self._world_size, Collectives(rank, meeting)), *args)

        threads = [threading.Thread(target=meeting.attend, args=(rank, work), daemon=True) for rank in range(self._world_size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if meeting.failure is not None:
            raise meeting.failure
        return answers

    def close(self) -> None:
        """Threads end with their job."""


class Meeting:
    """One rank runs at a time, in their order, from one collective to the next: so they never wait for the interpreter's lock."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.failure: RankError | None = None  # the first
        self._turns = [threading.Lock() for _ in range(world_size)]  # held = it is another's turn
        for turn in self._turns[1:]:
            turn.acquire()
        self._present = set(range(world_size))  # whose work has not ended
        self._brought: dict[int, Any] = {}  # by rank, to the next collective
        self._num_joined = 0

    def attend(self, rank: int, work: Callable[[int], None]) -> None:
        os.sched_setaffinity(0, {own_core()})  # of this thread: on one core, they share its cache
        torch.set_num_threads(1)  # of this thread
        self._turns[rank].acquire()
        try:
            if self.failure is None:
                work(rank)
        except Exception:
            self.failure = self.failure or RankError(f"rank {rank}: {traceback.format_exc()}")
        self._present.remove(rank)
        self._pass_on(rank)

    def exchange(self, rank: int, brought: Any, join: Callable[[list[Any]], None]) -> None:
        """Returns once every rank has brought its part and the last of them has joined all."""
        self._check()
        num_joined = self._num_joined
        self._brought[rank] = brought
        if len(self._brought) == self.world_size:
            join([self._brought[rank] for rank in range(self.world_size)])
            self._brought.clear()
            self._num_joined += 1
        self._pass_on(rank)
        self._turns[rank].acquire()
        self._check()
        if self._num_joined == num_joined:
            raise RankError("the others do not come to this collective")

    def _check(self) -> None:
        if self.failure is not None:
            raise RankError("another rank failed")

    def _pass_on(self, rank: int) -> None:
        others = [*range(rank + 1, self.world_size), *range(rank + 1)]
        if next_one := [other for other in others if other in self._present]:
            self._turns[next_one[0]].release()


class Collectives(dist.ProcessGroup):
    """What torch.distributed calls for one rank."""

    def __init__(self, rank: int, meeting: Meeting) -> None:
        super().__init__(rank, meeting.world_size)  # type: ignore[call-arg]
        self._rank, self._meeting = rank, meeting

    def allreduce(self, tensors: list[Tensor], options: object) -> None:  # type: ignore[override]
        self._meeting.exchange(self._rank, tensors[0], _sum)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], options: object) -> None:  # type: ignore[override]
        self._meeting.exchange(self._rank, (outputs[0], inputs[0]), _gather)


def _sum(tensors: list[Tensor]) -> None:
    total = torch.stack(tensors).sum(0)
    for tensor in tensors:
        tensor.copy_(total)


def _gather(brought: list[tuple[list[Tensor], Tensor]]) -> None:
    for outputs, _ in brought:
        for output, (_, tensor) in zip(outputs, brought, strict=True):
            assert output.shape == tensor.shape
            output.copy_(tensor)


def own_core() -> int:
    """One for each of the processes that tests are shared out among."""
    cores = sorted(os.sched_getaffinity(0))
    return cores[int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % len(cores)]
