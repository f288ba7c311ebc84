"""Prometheus metrics of one ingress replica, plus the drivers' numbers at scrape time. Knows no routes."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from loray.deployments.adapter_metrics import AdapterMetrics
from loray.deployments.adapter_status import AdapterStatus
from loray.deployments.generation import Generation, Timing, num_taken
from loray.deployments.request import GenerationRequest
from loray.deployments.request_log import RequestNote

LATENCY_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)  # seconds
TOKEN_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1)  # seconds
EMBEDDED = "success"  # the outcome of an embedding that was made


def adapter_kind(adapter_id: str) -> str:
    """A label with two values: thousands of adapter ids would be thousands of series."""
    return "adapter" if adapter_id else "base"


DriverStats = Mapping[str, Mapping[str, float]]  # by replica, the driver's numbers under its own names


class Metrics:
    """`replica`: a label of all that this process counts, so that no series falls where a scrape reaches another one; "" = none."""

    def __init__(self, replica: str = "", default_source: str = "local") -> None:
        self._counted = CollectorRegistry()  # by this process
        self._registry = CollectorRegistry()  # all that is told
        self._driver = _DriverNumbers()
        self._registry.register(self._driver)
        self._registry.register(_OfReplica(self._counted, replica))
        self._adapters = AdapterMetrics(self._counted, self._registry, default_source)
        self._requests = self._counter("requests", "HTTP requests", ["route", "status"])
        self._failures = self._counter("failures", "Errors that callers were told, by type", ["type"])
        self._key_requests = self._counter("key_requests", "HTTP requests by the API key's name", ["key", "status"])
        self._key_tokens = self._counter("key_tokens", "Tokens by the API key's name", ["key", "kind"])
        self._generations = self._counter("generations", "Generations by outcome", ["adapter", "outcome"])
        self._embeddings = self._counter("embeddings", "Embeddings by outcome", ["adapter", "outcome"])
        self._prompt_tokens = self._counter(
            "prompt_tokens", "Prompt tokens that a driver took, of each sequence and of embeddings", ["adapter"]
        )
        self._generated_tokens = self._counter("generated_tokens", "Generated tokens", ["adapter"])
        self._first_token = self._histogram("time_to_first_token_seconds", "From request to first token", LATENCY_BUCKETS)
        self._queue = self._histogram("queue_seconds", "From validation to a place in the batch", LATENCY_BUCKETS)
        self._gap = self._histogram("inter_token_seconds", "Between tokens", TOKEN_BUCKETS)
        self._total = self._histogram("generation_seconds", "From request to last token", LATENCY_BUCKETS)
        self._embedding = self._histogram("embedding_seconds", "From request to embedding", LATENCY_BUCKETS)

    def observe_request(self, note: RequestNote, route: str, status: str) -> None:
        """Once, when it is over."""
        self._requests.labels(route, status).inc()
        if note.error_type:
            self._failures.labels(note.error_type).inc()
        if note.key_name:
            self._key_requests.labels(note.key_name, status).inc()
            self._key_tokens.labels(note.key_name, "prompt").inc(note.num_prompt_tokens)
            self._key_tokens.labels(note.key_name, "generated").inc(note.num_tokens)

    def observe_generation(self, generation: Generation, outcome: str) -> None:
        """Once, when it is over."""
        kind = adapter_kind(generation.request.adapter_id)
        timing = generation.timing
        self._adapters.observe_generation(generation, outcome)
        self._generations.labels(kind, outcome).inc()
        self._prompt_tokens.labels(kind).inc(num_taken(generation.request, timing))
        self._generated_tokens.labels(kind).inc(generation.num_tokens)
        if not generation.num_tokens:
            return
        self._first_token.labels(kind).observe(timing.first_token - timing.received)
        self._queue.labels(kind).observe(max(0.0, timing.admitted - timing.validated))
        self._total.labels(kind).observe(timing.finished - timing.received)
        gap_histogram = self._gap.labels(kind)
        for seconds in timing.gaps:
            gap_histogram.observe(seconds)

    def observe_embedding(self, request: GenerationRequest, timing: Timing, outcome: str) -> None:
        """Once, when it is over."""
        kind = adapter_kind(request.adapter_id)
        self._adapters.observe_embedding(request, timing, outcome, outcome == EMBEDDED)
        self._embeddings.labels(kind, outcome).inc()
        self._prompt_tokens.labels(kind).inc(num_taken(request, timing))
        if outcome == EMBEDDED:
            self._embedding.labels(kind).observe(timing.finished - timing.received)

    def observe_adapters(self, statuses: Sequence[AdapterStatus]) -> None:
        """As the driver replicas have them now."""
        self._adapters.observe_statuses(statuses)

    def text(self, driver_stats: DriverStats) -> bytes:
        self._driver.stats = driver_stats
        return generate_latest(self._registry)

    def families(self, driver_stats: DriverStats) -> list[dict[str, Any]]:
        """The same as plain values, for JSON."""
        self._driver.stats = driver_stats
        return [
            {
                "name": family.name,
                "type": family.type,
                "help": family.documentation,
                "samples": [{"name": sample.name, "labels": sample.labels, "value": sample.value} for sample in family.samples],
            }
            for family in self._registry.collect()
        ]

    def _counter(self, name: str, description: str, labels: list[str]) -> Counter:
        return Counter(f"loray_{name}", description, labels, registry=self._counted)

    def _histogram(self, name: str, description: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"loray_{name}", description, ["adapter"], registry=self._counted, buckets=buckets)


class _DriverNumbers(Collector):
    """Whatever the drivers report, under their own names."""

    def __init__(self) -> None:
        self.stats: DriverStats = {}

    def collect(self) -> Iterator[Metric]:
        for name in sorted({name for numbers in self.stats.values() for name in numbers}):
            make = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
            family = make(f"loray_driver_{name}", f"The driver's {name.replace('_', ' ')}", labels=["replica"])
            for replica, numbers in self.stats.items():
                if name in numbers:
                    family.add_metric([replica], numbers[name])
            yield family


class _OfReplica(Collector):
    """What a registry has, with one more label."""

    def __init__(self, registry: CollectorRegistry, replica: str) -> None:
        self._registry = registry
        self._labels = {"replica": replica} if replica else {}

    def collect(self) -> Iterator[Metric]:
        for family in self._registry.collect():
            family.samples = [sample._replace(labels=sample.labels | self._labels) for sample in family.samples]
            yield family
