"""When to plan the next step while a long one with prompts runs: late, for the requests that come meanwhile.

What comes after the next step is planned waits for all of it; and where requests come together, the first of them would be through
its prompt, and have a decode step of its own, before the others begin. Ranks hardly wait for it: when a step ends before its time, the
next is planned at once, and after a short one it always is.
"""

from typing import NamedTuple

from loray.deployments.plan import Plan

LONG_S = 0.04
SHARE = 0.75  # of the time that a long step is likely to take; in the rest the next one reaches the ranks


class _Took(NamedTuple):
    num_tokens: int
    seconds: float


class StepPace:
    def __init__(self) -> None:
        self._latest: dict[int, _Took] = {}  # steps with prompts, by the magnitude of their number of tokens

    def took(self, plan: Plan, seconds: float) -> None:
        if _has_prompts(plan):
            self._latest[_magnitude(plan)] = _Took(plan.num_tokens, seconds)

    def wait_s(self, plan: Plan) -> float:
        """How long after this step has begun the next one is planned."""
        latest = self._latest.get(_magnitude(plan))
        if not latest or not _has_prompts(plan):
            return 0.0
        seconds = latest.seconds * min(1.0, plan.num_tokens / latest.num_tokens)  # a little more of them may take no longer
        return SHARE * seconds if seconds >= LONG_S else 0.0


def _has_prompts(plan: Plan) -> bool:
    return plan.num_tokens > len(plan.rows)


def _magnitude(plan: Plan) -> int:
    return plan.num_tokens.bit_length()
