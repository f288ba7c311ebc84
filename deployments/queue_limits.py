"""Who may wait at an engine: what its queue, KV cache and adapter pools have no room for is refused. Changes nothing, knows no ranks."""

import msgspec

from loray.deployments.adapter_tiers import AdapterTiers
from loray.deployments.errors import InvalidRequest, Overloaded
from loray.deployments.fair_queue import adapter_name
from loray.deployments.scheduler import Scheduler
from loray.deployments.sequence import Sequence


class QueueLimits(msgspec.Struct, frozen=True):
    """Requests that may wait; beyond them one is answered with Overloaded."""

    max_waiting: int
    max_waiting_of_adapter: int


def check_admission(sequence: Sequence, scheduler: Scheduler, tiers: AdapterTiers, limits: QueueLimits) -> None:
    """Raises a LorayError if this sequence could not wait, or never run, here."""
    num_tokens = sequence.request.max_tokens
    adapter = tiers.table.known(sequence.adapter) if sequence.adapter else None
    num_waiting = scheduler.waiting.num_waiting_of(adapter_name(adapter))
    if len(scheduler.waiting) >= limits.max_waiting * (1 if num_waiting else 2):  # a full queue is of those who fill it
        raise Overloaded(f"{len(scheduler.waiting)} requests are waiting already; try again")
    if num_waiting >= limits.max_waiting_of_adapter:
        raise Overloaded(f"{num_waiting} requests of {adapter.adapter_id if adapter else 'the base model'} are waiting already; try again")
    if scheduler.blocks.num_needed(num_tokens) > scheduler.blocks.num_blocks:
        room = scheduler.blocks.num_blocks * scheduler.blocks.block_size
        what = "the input is" if sequence.request.pooling else "prompt and max_new_tokens are"
        raise InvalidRequest(f"{what} {num_tokens} tokens, more than the KV cache holds ({room})")
    if sequence.adapter:
        tiers.check(sequence.adapter)
