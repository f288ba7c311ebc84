"""How many steps the ranks have at a time."""

from loray.models.step import StepResult
from tests.deployments.rank_in_process import RankInProcess, start_engine
from tests.deployments.simulated_rank import greedy
from tests.deployments.test_engine import Client


class CountingRank(RankInProcess):
    """Notes how many steps it has whenever it begins one."""

    def __init__(self) -> None:
        super().__init__()
        self.num_steps: list[int] = []

    def receive(self, timeout_ms: int) -> StepResult | None:
        if self.queue:
            self.num_steps.append(len(self.queue))
        return super().receive(timeout_ms)


def test_a_rank_has_its_next_step_before_it_begins_one() -> None:
    steps = CountingRank()
    client = Client(start_engine(steps))
    client.submit("r", [1, 2, 3])
    assert client.tokens("r") == greedy("", [1, 2, 3], 8)
    assert steps.num_steps == [2] * 7 + [1]
