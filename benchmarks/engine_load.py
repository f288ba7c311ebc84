"""Requests in a closed loop to an engine without HTTP: each client sends its next one when it has the last token of the one before."""

import itertools
import statistics
import time
from collections.abc import Callable, Collection, Iterable
from typing import Any, NamedTuple

import msgspec

from benchmarks.gpu_decode import Bench
from benchmarks.llama_8b import NUM_PROMPT
from loray.deployments.request import GenerationRequest, TokenEvent
from loray.models.step import Sampling


def answer_tokens(number: int) -> int:
    """Of a request's answer: 64 to 192, 128 on average. With equal ones all that came at once would end and begin at once again."""
    return 64 + 37 * number % 129


class Timed(NamedTuple):
    name: str  # of the adapter
    started: float
    times: list[float]  # of each token


class Load:
    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        self._num_sent = 0

    def run(
        self,
        names: Iterable[str],
        num_clients: int,
        num_new: int | Callable[[int], int],
        only: Collection[str] = (),
        num_prompt: int = NUM_PROMPT,
    ) -> dict[str, Any]:
        """A request for each adapter's name; an empty one is the base model. num_new: tokens of an answer, or of the one of a number.

        only: adapters whose requests are told of; all where there are none. num_prompt: tokens of each prompt."""
        lengths = num_new if callable(num_new) else lambda number: num_new
        wanted = ((name, num_prompt, lengths(number)) for number, name in enumerate(names))
        started = time.perf_counter()
        timed: dict[str, Timed] = {}
        num_open = sum(self._send(*request, timed) for request in itertools.islice(wanted, num_clients))
        while num_open:
            events = msgspec.msgpack.decode(self._bench.socket.recv(), type=list[TokenEvent])
            now = time.perf_counter()
            for event in events:
                assert not event.error, event.message
                timed[event.request_id].times.extend([now] * len(event.token_ids))
                if event.is_last:
                    num_open -= 1
                    num_open += sum(self._send(*request, timed) for request in itertools.islice(wanted, 1))
        told = [each for each in timed.values() if not only or each.name in only]
        return _summary(told, time.perf_counter() - started)

    def _send(self, name: str, num_prompt: int, num_new: int, timed: dict[str, Timed]) -> int:
        self._num_sent += 1
        prompt = [self._num_sent, *range(100, 99 + num_prompt)]  # none is found in the prefix cache
        request = GenerationRequest(
            request_id=str(self._num_sent), prompt_ids=prompt, max_new_tokens=num_new, sampling=Sampling(), ignore_eos=True
        )
        timed[request.request_id] = Timed(name, time.perf_counter(), [])
        adapter = self._bench.files.find(name) if name else None
        self._bench.engine.submit(request, adapter, self._bench.address, lambda ending: None)
        return 1


def _summary(timed: list[Timed], seconds: float) -> dict[str, Any]:
    first = [each.times[0] - each.started for each in timed]
    gaps = sorted(later - earlier for each in timed for earlier, later in itertools.pairwise(each.times))
    return {
        "tokens_per_s": round(sum(len(each.times) for each in timed) / seconds),
        "ttft_p50_ms": round(1000 * statistics.median(first), 1),
        "itl_p50_ms": round(1000 * statistics.median(gaps), 2),
        "itl_p99_ms": round(1000 * gaps[int(0.99 * len(gaps))], 2),
    }
