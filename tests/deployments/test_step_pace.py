import pytest

from loray.deployments.plan import Plan
from loray.deployments.step_pace import MAX_WAIT_S, StepPace


def step(num_tokens: int) -> Plan:
    """Of one row."""
    return Plan(rows={object(): object()}, num_tokens=num_tokens)  # type: ignore[dict-item]


def test_after_a_step_with_prompts_the_next_is_planned_when_half_of_it_is_over() -> None:
    pace = StepPace()
    pace.took(step(20), 0.03)
    assert pace.wait_s(step(20)) == pytest.approx(0.015) and pace.wait_s(step(31)) == pytest.approx(0.015)
    pace.took(step(20), 0.008)
    assert pace.wait_s(step(20)) == pytest.approx(0.004), "what the latest took counts"


def test_it_waits_never_long_and_never_where_it_knows_nothing_or_the_step_is_short() -> None:
    pace = StepPace()
    assert pace.wait_s(step(20)) == 0, "none of this size was seen yet"
    pace.took(step(500), 5.0)
    assert pace.wait_s(step(500)) == MAX_WAIT_S and pace.wait_s(step(20)) == 0
    pace.took(step(500), 0.003)
    assert pace.wait_s(step(500)) == 0


def test_decode_steps_never_wait() -> None:
    pace = StepPace()
    pace.took(step(1), 1.0)
    assert pace.wait_s(step(1)) == 0
