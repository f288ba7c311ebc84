"""Requests for a scheduler and a simulated rank, by the adapter."""

import random
from dataclasses import dataclass

from loray.deployments.sequence import Sequence
from tests.deployments.stepped_scheduler import Server


@dataclass
class Shape:
    """Sizes of requests, in tokens."""

    num_prompt: int
    num_output: int


def new_prompt(rng: random.Random, length: int) -> list[int]:
    return [rng.randint(0, 1_000_000) for _ in range(length)]


def output_of(sequence: Sequence) -> list[int]:
    return sequence.token_ids[sequence.num_prompt :]


def keep_waiting(server: Server, rng: random.Random, adapter: str, count: int, shape: Shape) -> None:
    """The adapter has this many waiting requests, whatever was admitted."""
    while server.scheduler.waiting.num_waiting_of(adapter) < count:
        server.add(new_prompt(rng, shape.num_prompt), shape.num_output, adapter)
