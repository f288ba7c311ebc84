"""Runs functions on every rank of a gloo group, each in its own process. What the functions do is their own matter."""

import socket
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import torch

from loray.models.parallel import init_parallel
from tests.models.forkserver import forkserver

Job = Callable[..., Any]
MAX_SECONDS = 240  # of one job


class RankGroup:
    """Starts with its first job and takes any number of them, one after another; a job that fails ends the processes."""

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._ranks: list[tuple[BaseProcess, Connection]] = []

    def run(self, job: Job, *args: Any) -> list[Any]:
        """job(parallel, *args) of each rank, in their order. The job must be a module's function; a rank's exception is raised here."""
        if not self._ranks:
            self._start()
        for _, pipe in self._ranks:
            pipe.send((job, args))
        answers: dict[Connection, Any] = {}
        while len(answers) < self._world_size:
            try:
                answers.update(_answers([pipe for _, pipe in self._ranks if pipe not in answers]))
            except RankError:
                self._kill()  # the others may wait for the failed rank in a collective
                raise
        return [answers[pipe] for _, pipe in self._ranks]

    def close(self) -> None:
        for _, pipe in self._ranks:
            pipe.close()
        for process, _ in self._ranks:
            process.join(timeout=10)
        self._kill()

    def _start(self) -> None:
        context = forkserver()
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        for rank in range(self._world_size):
            pipe, theirs = context.Pipe()
            process = context.Process(target=_rank, args=(rank, self._world_size, port, theirs), daemon=True)
            process.start()
            theirs.close()
            self._ranks.append((process, pipe))

    def _kill(self) -> None:
        for process, pipe in self._ranks:
            process.kill()
            pipe.close()
        self._ranks = []


class RankError(Exception):
    """What went wrong on a rank, with its traceback."""


def run_ranks(world_size: int, job: Job, *args: Any) -> list[Any]:
    """One job on a group of its own."""
    group = RankGroup(world_size)
    try:
        return group.run(job, *args)
    finally:
        group.close()


def _answers(pipes: list[Connection]) -> dict[Connection, Any]:
    """Of the ranks that answer next."""
    ready = wait(pipes, timeout=MAX_SECONDS)
    if not ready:
        raise RankError(f"{len(pipes)} ranks do not answer")
    answers = {}
    for pipe in pipes:
        if pipe in ready:
            try:
                answers[pipe] = pipe.recv()
            except EOFError:
                raise RankError("a rank's process ended without an answer") from None
            if isinstance(answers[pipe], RankError):
                raise answers[pipe]
    return answers


def _rank(rank: int, world_size: int, port: int, pipe: Connection) -> None:
    torch.set_num_threads(1)
    try:
        parallel = init_parallel(rank, world_size, "127.0.0.1", port, torch.device("cpu"))
        while True:
            try:
                job, args = pipe.recv()
            except EOFError:
                break
            pipe.send(job(parallel, *args))
        torch.distributed.destroy_process_group()
    except Exception:
        pipe.send(RankError(f"rank {rank}: {traceback.format_exc()}"))
