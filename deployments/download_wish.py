"""One request's wish for an adapter of a source: from where, with whose token, and how long it has."""

from dataclasses import dataclass, field

from loray.deployments.adapter_sources import Place
from loray.deployments.remembered_failures import Asker


@dataclass(frozen=True, slots=True)
class Wish:
    place: Place
    token: str = field(repr=False)  # "" = none
    asker: Asker
    room_until: float = 0.0  # how long room on disk is waited for, by the monotonic clock
