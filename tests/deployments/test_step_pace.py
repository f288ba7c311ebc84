import pytest

from loray.deployments.plan import Plan
from loray.deployments.step_pace import LONG_S, SHARE, StepPace


def step(num_tokens: int) -> Plan:
    """Of one row."""
    return Plan(rows={object(): object()}, num_tokens=num_tokens)  # type: ignore[dict-item]


def test_while_a_long_step_with_prompts_runs_the_next_is_planned_late() -> None:
    pace = StepPace()
    pace.took(step(20), 1.0)
    assert pace.wait_s(step(20)) == SHARE
    pace.took(step(20), 0.9 * LONG_S)
    assert pace.wait_s(step(20)) == 0, "what the latest took counts"


def test_fewer_tokens_take_less_time_and_more_are_not_known_to_take_more() -> None:
    pace = StepPace()
    pace.took(step(20), 1.0)
    assert pace.wait_s(step(16)) == pytest.approx(0.8 * SHARE)
    assert pace.wait_s(step(31)) == SHARE
    pace.took(step(20), 1.1 * LONG_S)
    assert pace.wait_s(step(16)) == 0


def test_where_nothing_is_known_of_such_a_step_the_next_is_planned_at_once() -> None:
    pace = StepPace()
    assert pace.wait_s(step(20)) == 0
    pace.took(step(500), 5.0)
    assert pace.wait_s(step(500)) == 5.0 * SHARE and pace.wait_s(step(20)) == 0


def test_decode_steps_never_wait() -> None:
    pace = StepPace()
    pace.took(step(1), 1.0)
    assert pace.wait_s(step(1)) == 0
