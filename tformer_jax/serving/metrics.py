"""Metrics of the server, for Prometheus."""

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from tformer_jax.serving.worker import Load

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
"""Upper bounds of histogram buckets."""


class Metrics:
    """Metrics that the event loop records, and the engine's `load`."""

    def __init__(self, load: Callable[[], Load]) -> None:
        disable_created_metrics()  # the time at which each counter was created
        self._registry = CollectorRegistry()
        self._registry.register(_LoadCollector(load))
        self.answered = Counter(
            "tformer_requests",
            "HTTP requests by route and status; 499: the client disconnected before the end of the response.",
            ["route", "status"],
            registry=self._registry,
        )
        self.first_token = self._histogram("first_token", "Time from the request to its first token.")
        self.request = self._histogram("request", "Time from the request to its last result.")

    def text(self) -> bytes:
        """Returns all metrics in Prometheus' text format."""
        return generate_latest(self._registry)

    def _histogram(self, name: str, meaning: str) -> Histogram:
        return Histogram(f"tformer_{name}_seconds", meaning, buckets=SECONDS, registry=self._registry)


class _LoadCollector(Collector):
    """Reads the load of the engine whenever the metrics are requested."""

    def __init__(self, load: Callable[[], Load]) -> None:
        self._load = load

    def collect(self) -> Iterator[Metric]:
        load = self._load()
        yield GaugeMetricFamily("tformer_requests_running", "Requests in the engine's rows.", load.running)
        yield GaugeMetricFamily("tformer_requests_waiting", "Requests that wait for a row.", load.waiting)
        yield CounterMetricFamily("tformer_tokens_generated", "Tokens generated.", load.tokens)
        yield GaugeMetricFamily("tformer_pages_used", "Pages of the cache in use.", load.pages_used)
        yield GaugeMetricFamily("tformer_pages", "Pages of the cache.", load.pages)
