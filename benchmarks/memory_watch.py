"""The private memory of processes while adapters come and go, beside what the host tier and the KV cache hold: what fills is no leak.

Growth counts from when the tier is full, but not within the first minute. Starts and stops nothing.
"""

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
import psutil

SAMPLE_S = 5.0
SETTLE_S = 60.0  # memory may grow for so long: pools and caches fill
FULL_SHARE = 0.95  # of the most that the tier ever held: as much as it takes, with room for one that is on its way
MIB = 1 << 20


class Sample(NamedTuple):
    at: float  # seconds since the first
    host_mib: float
    num_blocks: int  # that the prefix cache has: on a CPU a block's memory is the rank's, from when it is first written
    process_mib: dict[int, float]  # by process id


class MemoryWatch:
    def __init__(self, processes: Callable[[], Iterable[tuple[psutil.Process, str]]]) -> None:
        self._processes = processes  # with their titles, as of now
        self._titles: dict[int, str] = {}  # by process id
        self._samples: list[Sample] = []
        self._started = time.monotonic()
        self._capacity_mib = 0.0
        self._max_blocks = 0

    def sample(self, stats: Mapping[str, float]) -> None:
        """stats: the driver's, of this moment."""
        found: dict[int, float] = {}
        for process, title in self._processes():
            try:
                found[process.pid] = process.memory_full_info().uss / MIB
                self._titles[process.pid] = title
            except psutil.Error:  # it has ended meanwhile
                continue
        self._capacity_mib, self._max_blocks = stats["adapter_host_bytes"] / MIB, int(stats["kv_blocks"])
        at, host_mib = time.monotonic() - self._started, stats["adapter_host_bytes_used"] / MIB
        self._samples.append(Sample(at, host_mib, int(stats["kv_blocks_cached"]), found))

    def summary(self) -> dict[str, Any]:
        """Both times, and from the later one on the slope of a straight line through each process's samples and the tier's."""
        times = [sample.at for sample in self._samples]
        full_s = full_after([sample.host_mib for sample in self._samples], times)
        settled_s = max(full_s, min(SETTLE_S, times[-1] / 2))
        series = {pid: [(s.at, s.process_mib[pid]) for s in self._samples if pid in s.process_mib] for pid in self._titles}
        grown = [{"process": self._titles[pid], **growth(samples, settled_s)} for pid, samples in series.items()]
        return {
            "host_tier": {
                "capacity_mib": round(self._capacity_mib, 1),
                "most_mib": round(max(sample.host_mib for sample in self._samples), 1),
                **growth([(sample.at, sample.host_mib) for sample in self._samples], settled_s),
            },
            "kv_blocks_cached": {
                "capacity": self._max_blocks,
                "settled": next(sample.num_blocks for sample in self._samples if sample.at >= settled_s),
                "last": self._samples[-1].num_blocks,
            },
            "host_tier_full_after_s": round(full_s),
            "settled_after_s": round(settled_s),
            "seconds": round(times[-1]),
            "processes": sorted(grown, key=lambda one: -one["last_mib"]),
        }


def full_after(host_mib: list[float], times: list[float]) -> float:
    """Seconds: when the tier first held nearly the most that it ever did. Its capacity is more where all adapters fit."""
    return next(at for at, held in zip(times, host_mib, strict=True) if held >= FULL_SHARE * max(host_mib))


def growth(samples: list[tuple[float, float]], settled_s: float) -> dict[str, Any]:
    """samples: seconds, MiB. Fewer than three since it has settled make no slope."""
    settled = [(at, mib) for at, mib in samples if at >= settled_s]
    slope = float(np.polyfit(*np.array(settled).T, 1)[0]) * 60 if len(settled) >= 3 else None
    return {
        "first_mib": round(samples[0][1], 1),
        "settled_mib": round(settled[0][1], 1) if settled else None,
        "last_mib": round(samples[-1][1], 1),
        "mib_by_minute": [round(next(mib for at, mib in samples if at >= 60 * minute)) for minute in range(int(samples[-1][0] / 60) + 1)],
        "mib_per_minute": None if slope is None else round(slope, 2),
    }
