"""Adapters that come anew beside one that is always here: none keeps the others from being served."""

import itertools
import random
from collections.abc import Callable

import pytest

from loray.deployments.sequence import Sequence
from tests.deployments.stepped_scheduler import Server
from tests.deployments.traffic import Shape, keep_waiting, new_prompt

BUSY = "busy"


class Clients:
    """So many of them, each with one request at a time for an adapter of a new name, or of so many names in turn."""

    def __init__(self, server: Server, rng: random.Random, count: int, shape: Shape, num_names: int = 10**9) -> None:
        self._server, self._rng, self._shape = server, rng, shape
        self._names = (f"new{number % num_names}" for number in itertools.count())
        self._asked: list[Sequence | None] = [None] * count

    def ask(self) -> None:
        self._asked = [asked if asked and not asked.is_finished else self._next() for asked in self._asked]

    def _next(self) -> Sequence:
        return self._server.add(new_prompt(self._rng, self._shape.num_prompt), self._shape.num_output, next(self._names))


def shares(server: Server, ask: Callable[[], None], num_steps: int, num_parts: int) -> list[float]:
    """Of all computed tokens, those of the busy one, in each part of the time."""
    found = []
    for _ in range(num_parts):
        busy, total = server.served[BUSY], server.served.total()
        for _ in range(num_steps // num_parts):
            ask()
            server.turn()
        found.append((server.served[BUSY] - busy) / (server.served.total() - total))
    return found


@pytest.mark.parametrize("num_streams", [0, 1, 3])
@pytest.mark.parametrize("num_names", [1, 4, 10**9], ids=["one", "four in turn", "ever new"])
def test_what_nobody_wanted_is_no_debt_to_those_that_come_later(num_streams: int, num_names: int) -> None:
    """Streams of one token a step leave the rest to the busy one, for long; then others ask for as much, under one name after another."""
    rng, server = random.Random(0), Server(num_blocks=4000, num_pages=400, max_batch_tokens=32, max_running=8)
    for number in range(num_streams):
        server.add([number], 10**6, f"stream{number}")
    steps = itertools.count()

    def ask() -> None:
        keep_waiting(server, rng, BUSY, 4, Shape(12, 12))
        if (step := next(steps)) >= 600:
            keep_waiting(server, rng, f"new{step // 100 % num_names}", 4, Shape(12, 12))

    shares(server, ask, 600, 1)
    found = shares(server, ask, 900, 6)
    fair = (1 - num_streams / 8) / 2  # the streams have as many of eight slots
    assert min(found) > 0.8 * fair, found


@pytest.mark.parametrize("num_names", [200, 10**9], ids=["of two hundred", "ever new"])
@pytest.mark.parametrize(
    ("clients", "shape", "max_running"),
    [(32, Shape(4, 200), 16), (8, Shape(256, 4), 16), (4, Shape(1000, 1), 16), (2, Shape(2000, 1), 16)],
    ids=str,
)
def test_one_that_always_asks_gets_half_of_its_share_at_least(clients: int, shape: Shape, max_running: int, num_names: int) -> None:
    rng = random.Random(0)
    server = Server(num_blocks=20_000, num_pages=400, max_batch_tokens=64, max_running=max_running, has_cache=False)
    others = Clients(server, rng, clients, shape, num_names)

    def ask() -> None:
        keep_waiting(server, rng, BUSY, 4, shape)
        others.ask()

    found = shares(server, ask, 4000, 2)
    assert min(found) > 0 and sum(found) / 2 >= 0.5 / (clients + 1), found


@pytest.mark.parametrize("num_names", [20, 10**9], ids=["of twenty", "ever new"])
def test_a_long_prompt_in_progress_goes_on_while_others_come(num_names: int) -> None:
    """Nobody waits: there are slots for all."""
    rng, server = random.Random(0), Server(num_blocks=20_000, num_pages=400, max_batch_tokens=64, max_running=16, has_cache=False)
    long = server.add(new_prompt(rng, 8000), 1, BUSY)
    others = Clients(server, rng, 4, Shape(500, 1), num_names)
    for _ in range(2 * 5 * 8000 // 64):
        others.ask()
        server.turn()
    assert long.is_finished


@pytest.mark.parametrize("weight", [10.0, 100.0])
def test_a_weight_counts_beside_ever_new_ones(weight: float) -> None:
    rng = random.Random(0)
    server = Server(num_blocks=20_000, num_pages=400, max_batch_tokens=64, max_running=16, has_cache=False, weights={BUSY: weight})
    others = Clients(server, rng, 4, Shape(256, 4))

    def ask() -> None:
        keep_waiting(server, rng, BUSY, 4, Shape(256, 4))
        others.ask()

    found = shares(server, ask, 2000, 2)
    assert found[-1] > 0.95 * 0.5 * weight / (weight + 4), found


@pytest.mark.parametrize("shape", [Shape(200, 20), Shape(20, 200)], ids=str)
def test_one_that_seldom_asks_has_its_turn_at_once_beside_many_that_always_do(shape: Shape) -> None:
    rng, server = random.Random(0), Server(num_blocks=20_000, num_pages=400, max_batch_tokens=64, max_running=16, has_cache=False)
    names = [f"busy{number}" for number in range(8)]
    delays: list[int] = []
    new, came = None, 0
    for step in range(1500):
        for name in names:
            keep_waiting(server, rng, name, 3, shape)
        if step % 20 == 0:
            new, came = server.add(new_prompt(rng, 48), 4, f"new{step}"), step
        server.turn()
        if new and new.num_output:
            delays.append(step - came + 1)
            new = None
    served = [server.served[name] for name in names]
    assert sorted(delays)[len(delays) // 2] <= 4 and len(delays) > 60, delays
    assert max(served) < 1.05 * min(served)
