"""Runs a function on every rank of a gloo group, each in its own process."""

import multiprocessing
import socket
from collections.abc import Callable
from multiprocessing.queues import Queue
from typing import Any

import torch

from loray.models.parallel import init_parallel

Job = Callable[..., Any]


def run_ranks(world_size: int, job: Job, *args: Any) -> list[Any]:
    """job(parallel, *args) of each rank, in their order. The job must be a module's function; a rank's exception is raised here."""
    context = multiprocessing.get_context("forkserver")  # a fork of this process would inherit its OpenMP threads, and hang
    context.set_forkserver_preload(["loray.models.runner", "transformers.models.llama.configuration_llama", "numpy"])
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    results = context.Queue()
    processes = [context.Process(target=_rank, args=(rank, world_size, port, results, job, args)) for rank in range(world_size)]
    for process in processes:
        process.start()
    try:
        answers = dict(results.get(timeout=240) for _ in processes)
    finally:
        for process in processes:
            process.join(timeout=10)
            process.kill()
    for answer in answers.values():
        if isinstance(answer, Exception):
            raise answer
    return [answers[rank] for rank in range(world_size)]


def _rank(rank: int, world_size: int, port: int, results: "Queue[Any]", job: Job, args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    try:
        parallel = init_parallel(rank, world_size, "127.0.0.1", port, torch.device("cpu"))
        results.put((rank, job(parallel, *args)))
        torch.distributed.destroy_process_group()
    except Exception as error:
        results.put((rank, error))
