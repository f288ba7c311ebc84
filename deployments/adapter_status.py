"""What the admin API tells about an adapter, and what it can be told to do. Plain values that cross processes."""

from typing import Literal

import msgspec

AdapterState = Literal["known", "loading", "host", "gpu", "failed", "unloading"]
AdminAction = Literal["load", "unload", "pin", "unpin", "reload"]


class TierUse(msgspec.Struct):
    """How often one adapter came into a tier, and had to leave it for others."""

    num_loads: int = 0
    load_seconds: float = 0.0
    num_evictions: int = 0

    def __add__(self, other: "TierUse") -> "TierUse":
        return TierUse(self.num_loads + other.num_loads, self.load_seconds + other.load_seconds, self.num_evictions + other.num_evictions)


class AdapterStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One version of an adapter on one driver replica."""

    adapter_id: str
    source: str
    revision: str
    version: str  # "" = not looked up yet
    state: AdapterState  # the best of its tiers: host and gpu are on every rank
    rank: int  # the largest of its modules, 0 = not looked up yet
    is_pinned: bool
    is_private: bool
    is_merge: bool = False  # made by requests
    gpu_bytes: int
    host_bytes: int  # of the rank that needs most
    disk_bytes: int  # of its download; 0 for a local folder
    num_running: int  # requests, waiting ones included
    num_served: int
    num_failed: int
    last_used: float  # seconds since 1970, 0 = never
    gpu_use: TierUse = msgspec.field(default_factory=TierUse)
    host_use: TierUse = msgspec.field(default_factory=TierUse)
    disk_use: TierUse = msgspec.field(default_factory=TierUse)  # downloads and merges
    error: str = ""  # why the last load failed
    last_failure: str = ""  # why a request failed that the adapter could not serve, until one is served
