from loray.deployments.plan import Plan
from loray.deployments.step_pace import LONG_S, WAIT_S, StepPace


def step(num_tokens: int) -> Plan:
    """Of one row."""
    return Plan(rows={object(): object()}, num_tokens=num_tokens)  # type: ignore[dict-item]


def test_after_a_long_step_with_prompts_the_next_is_planned_a_moment_later() -> None:
    pace = StepPace()
    pace.took(step(20), LONG_S)
    assert pace.wait_s(step(20)) == pace.wait_s(step(31)) == WAIT_S
    pace.took(step(20), 0.9 * LONG_S)
    assert pace.wait_s(step(20)) == 0, "what the latest took counts"


def test_where_nothing_is_known_of_such_a_step_the_next_is_planned_at_once() -> None:
    pace = StepPace()
    assert pace.wait_s(step(20)) == 0
    pace.took(step(500), 5.0)
    assert pace.wait_s(step(500)) == WAIT_S and pace.wait_s(step(20)) == 0


def test_decode_steps_never_wait() -> None:
    pace = StepPace()
    pace.took(step(1), 1.0)
    assert pace.wait_s(step(1)) == 0
