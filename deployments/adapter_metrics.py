"""Prometheus metrics by adapter, for a bounded number of them. Knows neither routes nor the other metrics."""

from collections import Counter as Tally
from collections.abc import Iterator, Sequence
from typing import get_args

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from loray.deployments.adapter_sources import named
from loray.deployments.adapter_status import AdapterState, AdapterStatus, TierUse
from loray.deployments.errors import InvalidRequest
from loray.deployments.generation import Generation, Timing, num_taken
from loray.deployments.request import AdapterRef, GenerationRequest

MAX_LABELS = 100  # adapters with series of their own: thousands of ids would be tens of thousands of series
OTHER = "other"
PRIVATE = "private"  # who may read metrics need not know their names
MERGED = "merged"  # made up by requests
SHARED_LABELS = {OTHER, PRIVATE, MERGED}  # an adapter of such a name is one of the others
BUCKETS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 10)  # seconds


class AdapterMetrics:
    """The first adapters that do some work get their names as labels, the rest share one. Unknown names get none, however often asked.

    The series of an adapter that the driver replicas have forgotten, because it was unloaded, are removed.
    `counted` gets what this process counts, `told` what the driver replicas say."""

    def __init__(self, counted: CollectorRegistry, told: CollectorRegistry, default_source: str) -> None:
        self._default_source = default_source
        self._labels: dict[str, set[str]] = {}  # by adapter id, the outcomes it has had
        self._known: set[str] = set()  # adapter ids of the last statuses
        self._public: set[str] = set()  # adapter ids of the last statuses that everybody may read
        self._private: set[str] = set()  # the others
        self._missing: set[str] = set()  # with labels, and not among the last statuses
        self._requests = Counter("loray_adapter_requests", "Requests by adapter", ["adapter", "outcome"], registry=counted)
        self._tokens = Counter("loray_adapter_tokens", "Tokens by adapter", ["adapter", "kind"], registry=counted)
        self._queue = _histogram(
            "queue_seconds", "From request to a place in the batch, with the time that finding the adapter takes", counted
        )
        self._first_token = _histogram("time_to_first_token_seconds", "From request to first token", counted)
        self._gauges = _StatusGauges()
        told.register(self._gauges)

    def observe_generation(self, generation: Generation, outcome: str) -> None:
        label = self._label(generation.request, generation.num_tokens > 0)
        if not label:
            return
        timing = generation.timing
        self._count(label, outcome)
        self._tokens.labels(label, "prompt").inc(num_taken(generation.request, timing))
        self._tokens.labels(label, "generated").inc(generation.num_tokens)
        if timing.admitted:
            self._queue.labels(label).observe(timing.admitted - timing.received)
        if timing.first_token:
            self._first_token.labels(label).observe(timing.first_token - timing.received)

    def observe_embedding(self, request: GenerationRequest, timing: Timing, outcome: str, has_worked: bool) -> None:
        label = self._label(request, has_worked)
        if label:
            self._count(label, outcome)
            self._tokens.labels(label, "prompt").inc(num_taken(request, timing))

    def observe_statuses(self, statuses: Sequence[AdapterStatus]) -> None:
        before, self._known = self._known, {status.adapter_id for status in statuses}
        self._private = {status.adapter_id for status in statuses if status.is_private}
        self._public = {status.adapter_id for status in statuses if status.version} - self._private  # before, nobody knows
        missing = self._labels.keys() - self._known
        for adapter_id in (missing & (before | self._missing)) | (self._labels.keys() & self._private):  # or: it came after the last look
            self._forget(adapter_id)
        self._missing = missing & self._labels.keys()
        self._gauges.states = Tally(status.state for status in statuses)
        self._gauges.clear()
        for status in statuses:
            if status.adapter_id in self._labels and not status.is_private:
                self._gauges.add(status)

    def _label(self, request: GenerationRequest, has_worked: bool) -> str:
        """ "" for the base model."""
        if request.adapter is None:
            return ""
        name = self._name(request.adapter)
        is_public = name in self._public or not request.adapter.api_token  # a token may be sent where none is needed
        if name in self._private or not is_public:
            return PRIVATE
        if request.adapter.merge:
            return MERGED
        if has_worked and len(self._labels) < MAX_LABELS and name not in SHARED_LABELS:
            self._labels.setdefault(name, set())
        return name if name in self._labels else OTHER

    def _name(self, ref: AdapterRef) -> str:
        """As the driver replicas call it, however the request has written it."""
        try:
            return ref.adapter_id if ref.merge else named(ref, self._default_source).adapter_id
        except InvalidRequest:  # which no adapter has
            return ref.adapter_id

    def _count(self, label: str, outcome: str) -> None:
        self._requests.labels(label, outcome).inc()
        if label in self._labels:
            self._labels[label].add(outcome)

    def _forget(self, adapter_id: str) -> None:
        for outcome in self._labels.pop(adapter_id):
            self._requests.remove(adapter_id, outcome)
        for kind in ("prompt", "generated"):
            self._tokens.remove(adapter_id, kind)
        self._queue.remove(adapter_id)
        self._first_token.remove(adapter_id)


class _StatusGauges(Collector):
    """How many adapters are in which state, and what those with labels take in each tier and how they came there."""

    def __init__(self) -> None:
        self.states: Tally[AdapterState] = Tally()
        self._resident: Tally[tuple[str, str]] = Tally()  # bytes by adapter id and tier
        self._uses: dict[tuple[str, str], TierUse] = {}  # likewise

    def clear(self) -> None:
        self._resident.clear()
        self._uses.clear()

    def add(self, status: AdapterStatus) -> None:
        """Another version of one that is there counts too."""
        for tier, num_bytes in (("gpu", status.gpu_bytes), ("host", status.host_bytes), ("disk", status.disk_bytes)):
            self._resident[status.adapter_id, tier] += num_bytes
        for tier, use in (("gpu", status.gpu_use), ("host", status.host_use), ("disk", status.disk_use)):
            key = (status.adapter_id, tier)
            self._uses[key] = self._uses.get(key, TierUse()) + use

    def collect(self) -> Iterator[Metric]:
        states = GaugeMetricFamily("loray_adapters", "Versions of adapters by state", labels=["state"])
        for state in get_args(AdapterState):
            states.add_metric([state], self.states[state])
        resident = GaugeMetricFamily("loray_adapter_resident_bytes", "Bytes of an adapter by tier", labels=["adapter", "tier"])
        for key, num_bytes in self._resident.items():
            resident.add_metric(list(key), num_bytes)
        loads = CounterMetricFamily("loray_adapter_loads", "Loads of an adapter by tier", labels=["adapter", "tier"])
        seconds = CounterMetricFamily("loray_adapter_load_seconds", "Seconds of these loads", labels=["adapter", "tier"])
        evictions = CounterMetricFamily("loray_adapter_evictions", "Evictions of an adapter by tier", labels=["adapter", "tier"])
        for key, use in self._uses.items():
            loads.add_metric(list(key), use.num_loads)
            seconds.add_metric(list(key), use.load_seconds)
            evictions.add_metric(list(key), use.num_evictions)
        yield from (states, resident, loads, seconds, evictions)


def _histogram(name: str, description: str, registry: CollectorRegistry) -> Histogram:
    return Histogram(f"loray_adapter_{name}", description, ["adapter"], registry=registry, buckets=BUCKETS)
