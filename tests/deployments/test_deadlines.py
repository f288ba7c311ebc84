from loray.deployments.deadlines import MAX_SURPLUS, Deadlines


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
