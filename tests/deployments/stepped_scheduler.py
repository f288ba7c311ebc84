"""A scheduler and a simulated rank that step together, without threads, sockets or the engine."""

from collections import Counter, deque
from collections.abc import Mapping

from loray.cluster.channel import Address
from loray.deployments.adapters import Adapter, AdapterTable
from loray.deployments.block_pool import BlockPool
from loray.deployments.plan import Plan
from loray.deployments.request import AdapterRef, GenerationRequest
from loray.deployments.scheduler import Scheduler
from loray.deployments.sequence import Sequence
from loray.models.step import CapturedSteps, Pooling, Sampling, Step
from tests.deployments.simulated_rank import SimulatedRank

BLOCK = 4
NOBODY = Address("", b"")


class Server:
    """A scheduler and a simulated rank, one step ahead, as the engine runs them."""

    def __init__(
        self,
        num_blocks: int = 64,
        num_pages: int = 8,
        max_batch_tokens: int = 32,
        max_running: int = 8,
        eos: int = -1,
        has_cache: bool = True,
        weights: Mapping[str, float] | None = None,
        captured: CapturedSteps | None = None,
    ) -> None:
        blocks, adapters = BlockPool(num_blocks, BLOCK, has_cache), AdapterTable(num_pages)
        self.scheduler = Scheduler(blocks, adapters, max_batch_tokens, max_running, weights, captured)
        self.rank = SimulatedRank(num_blocks, BLOCK, num_pages)
        self.in_flight: deque[tuple[Plan, Step]] = deque()
        self.eos_ids = {eos}
        self.embeddings: dict[Sequence, list[float]] = {}
        self.served: Counter[str] = Counter()  # adapter id -> tokens computed
        self.arrivals = 0

    def add(
        self,
        prompt: list[int],
        max_new_tokens: int,
        adapter: str = "",
        num_pages: int = 1,
        pooling: Pooling = "",
        waits_for_grammar: bool = False,
    ) -> Sequence:
        request = GenerationRequest(
            request_id=str(self.arrivals),
            prompt_ids=prompt,
            max_new_tokens=max_new_tokens,
            sampling=Sampling(),
            adapter=AdapterRef(adapter_id=adapter) if adapter else None,
            pooling=pooling,
        )
        return self._add(request, Adapter(adapter, adapter, adapter, num_pages) if adapter else None, waits_for_grammar)

    def add_version(self, adapter_id: str, version: str, prompt: list[int], max_new_tokens: int, num_pages: int = 1) -> Sequence:
        """A request of one version of an adapter, whose files are named like the version."""
        ref = AdapterRef(adapter_id=adapter_id)
        request = GenerationRequest(
            request_id=str(self.arrivals), prompt_ids=prompt, max_new_tokens=max_new_tokens, sampling=Sampling(), adapter=ref
        )
        return self._add(request, Adapter(adapter_id, version, version, num_pages))

    def _add(self, request: GenerationRequest, adapter: Adapter | None, waits_for_grammar: bool = False) -> Sequence:
        sequence = Sequence(request, adapter, NOBODY, self.arrivals)
        sequence.waits_for_grammar = waits_for_grammar
        self.arrivals += 1
        self.scheduler.add(sequence)
        return sequence

    def embed(self, prompt: list[int], adapter: str = "") -> Sequence:
        return self.add(prompt, 1, adapter, pooling="mean")

    def turn(self) -> bool:
        """Send what can be sent, then take one result back. False when there was nothing to do."""
        while len(self.in_flight) < 2 and self.plan():
            pass
        return self.complete()

    def plan(self) -> Plan | None:
        plan = self.scheduler.schedule()
        assert self.scheduler._preempted.isdisjoint(self.scheduler.running), "who runs again waits no more"
        if plan:
            self.in_flight.append((plan, Step(0, list(plan.loads.values()), plan.admissions, list(plan.rows.values()))))
        return plan

    def complete(self) -> bool:
        if not self.in_flight:
            return False
        plan, step = self.in_flight.popleft()
        result = self.rank.execute(step)
        for sequence, row in plan.rows.items():
            self.served[sequence.request.adapter_id] += row.num_tokens
        embeddings = dict(zip(plan.pooled, result.embeddings, strict=True))
        for sequence in self.scheduler.complete(plan, result.token_ids, self.eos_ids):
            if sequence in embeddings:
                assert sequence not in self.embeddings, "an embedding is answered once"
                self.embeddings[sequence] = embeddings[sequence]
        return True

    def run(self) -> None:
        for _ in range(10_000):
            if not self.turn():
                return
        raise AssertionError("the scheduler never comes to rest")

    def assert_empty(self) -> None:
        assert not self.scheduler.running and not self.scheduler.waiting and not self.scheduler._preempted
        assert self.scheduler.waiting._clock._num_adapters == 0
        assert self.scheduler.blocks.num_used == 0
        assert self.scheduler.adapters.num_references == 0
