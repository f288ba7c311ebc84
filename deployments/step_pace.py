"""When to plan the next step while a long one with prompts runs: a moment later, for the requests that come meanwhile.

Requests often come together. Where the next step is planned as soon as one can be, the first of them is through its prompt, and has a
decode step of its own, before the others begin. Ranks never wait for it: after a short step the next is planned at once.
"""

from loray.deployments.plan import Plan

WAIT_S = 0.02
LONG_S = 2 * WAIT_S


class StepPace:
    def __init__(self) -> None:
        self._seconds: dict[int, float] = {}  # that the latest step with prompts took, by the magnitude of its number of tokens

    def took(self, plan: Plan, seconds: float) -> None:
        if _has_prompts(plan):
            self._seconds[_magnitude(plan)] = seconds

    def wait_s(self, plan: Plan) -> float:
        """How long after this step has begun the next one is planned."""
        return WAIT_S if _has_prompts(plan) and self._seconds.get(_magnitude(plan), 0.0) >= LONG_S else 0.0


def _has_prompts(plan: Plan) -> bool:
    return plan.num_tokens > len(plan.rows)


def _magnitude(plan: Plan) -> int:
    return plan.num_tokens.bit_length()
