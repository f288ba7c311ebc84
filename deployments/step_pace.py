"""When to plan the next step while one with prompts runs: late, for the requests that come meanwhile, but before the ranks are through.

Requests often come together. Where the next step is planned as soon as one can be, the first of them is through its prompt, and has a
decode step of its own, before the others begin.
"""

from loray.deployments.plan import Plan

MAX_WAIT_S = 0.02
MIN_STEP_S = 0.004  # after a shorter one the ranks might wait


class StepPace:
    def __init__(self) -> None:
        self._seconds: dict[int, float] = {}  # that the latest step with prompts took, by the magnitude of its number of tokens

    def took(self, plan: Plan, seconds: float) -> None:
        if _has_prompts(plan):
            self._seconds[_magnitude(plan)] = seconds

    def wait_s(self, plan: Plan) -> float:
        """How long after this step has begun the next one is planned."""
        seconds = self._seconds.get(_magnitude(plan), 0.0) if _has_prompts(plan) else 0.0
        return min(seconds / 2, MAX_WAIT_S) if seconds >= MIN_STEP_S else 0.0


def _has_prompts(plan: Plan) -> bool:
    return plan.num_tokens > len(plan.rows)


def _magnitude(plan: Plan) -> int:
    return plan.num_tokens.bit_length()
