import asyncio
import time

import pytest

from loray.deployments import deadlines as module
from loray.deployments.deadlines import MAX_SURPLUS, Deadlines, in_time, seconds_left
from loray.deployments.errors import DeadlineExceeded
from tests.deployments.rank_in_process import RankInProcess, start_engine
from tests.deployments.scripted_backend import run
from tests.deployments.simulated_rank import greedy
from tests.deployments.test_engine import Client


def test_the_earliest_comes_first_and_only_when_it_is_due() -> None:
    deadlines = Deadlines()
    assert deadlines.seconds_left(0) is None
    for request_id, moment in (("b", 20.0), ("a", 10.0), ("c", 30.0)):
        deadlines.add(request_id, moment)
    assert deadlines.seconds_left(4) == 6 and list(deadlines.pop_due(9.9)) == []
    assert list(deadlines.pop_due(20)) == ["a", "b"]
    assert deadlines.seconds_left(40) == 0


def test_requests_that_ended_in_time_take_no_room_for_long() -> None:
    deadlines = Deadlines()
    for i in range(1000):
        deadlines.add(str(i), 1000.0 - i)
        deadlines.forget_ended({str(i): None})
        assert len(deadlines._heap) <= MAX_SURPLUS + 2
    assert list(deadlines.pop_due(1000))[0] == "999"


def test_the_engine_keeps_few_deadlines_of_requests_that_ended_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_SURPLUS", 2)
    engine = start_engine(RankInProcess())
    client = Client(engine)
    for i in range(20):
        client.submit(str(i), [1], max_new_tokens=1, deadline_s=600)
        client.finish(str(i))
    assert engine.call(lambda tiers: len(engine._deadlines._heap)).result(5) < 10


def test_a_request_is_not_ended_by_the_deadline_of_an_earlier_one_with_its_id() -> None:
    steps = RankInProcess()
    engine = start_engine(steps)
    client = Client(engine)
    client.submit("r", [1], deadline_s=600)
    client.finish("r")
    steps.gate.clear()
    client.submit("r", [1], deadline_s=6000)
    engine.call(lambda tiers: engine._end_late(time.monotonic() + 3000)).result(5)
    steps.gate.set()
    assert client.tokens("r") == greedy("", [1], 8)


def test_what_is_left_of_a_limit_is_never_none_at_all() -> None:
    now = time.monotonic()
    assert 4 < seconds_left(10, now - 5) <= 5
    assert 0 < seconds_left(10, now - 50) < 0.01
    assert seconds_left(0, now - 50) == seconds_left(float("nan"), now) == 0


def test_what_takes_longer_than_its_time_is_ended_and_other_timeouts_stay_what_they_are() -> None:
    async def scenario() -> None:
        with pytest.raises(DeadlineExceeded, match="still asleep"):
            async with in_time(0.01, "still asleep"):
                await asyncio.Event().wait()
        with pytest.raises(TimeoutError):
            async with in_time(60, ""):
                raise TimeoutError
        async with in_time(0, ""):
            await asyncio.sleep(0)

    run(scenario())
