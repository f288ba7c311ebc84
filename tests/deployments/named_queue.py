"""A fair queue that is easy to fill."""

from loray.cluster.channel import Address
from loray.deployments.adapters import Adapter
from loray.deployments.fair_queue import FairQueue
from loray.deployments.request import GenerationRequest
from loray.deployments.sequence import Sequence
from loray.models.step import Sampling

NOBODY = Address("", b"")


class NamedQueue(FairQueue):
    """With sequences that are told apart by name, and adapters that are in the pool unless said otherwise."""

    def __init__(self, **weights: float) -> None:
        super().__init__(weights)
        self.adapters: dict[str, Adapter] = {}
        self.num_arrived = 0

    def adapter(self, version: str, page_ids: list[int] | None = None, is_ready: bool = True) -> Adapter:
        """`a.2` is another version of `a`."""
        page_ids = [0] if page_ids is None else page_ids
        made = Adapter(version.split(".")[0], version, version, 1, page_ids=page_ids, is_ready=is_ready)
        return self.adapters.setdefault(version, made)

    def arrive(self, name: str, version: str = "", num_prompt: int = 1) -> Sequence:
        request = GenerationRequest(request_id=name, prompt_ids=[1] * num_prompt, max_new_tokens=1, sampling=Sampling())
        sequence = Sequence(request, self.adapter(version) if version else None, NOBODY, self.num_arrived)
        self.num_arrived += 1
        self.add(sequence)
        return sequence

    def start(self, sequence: Sequence, num_tokens: int = 0) -> Sequence:
        self.take(sequence)
        sequence.slot = 0
        self.compute(sequence, num_tokens)
        return sequence

    def compute(self, sequence: Sequence, num_tokens: int) -> None:
        for _ in range(num_tokens):
            self.charge(sequence, 1)

    def names(self) -> list[str]:
        return [sequence.request.request_id for sequence in self]
