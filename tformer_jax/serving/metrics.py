"""Metrics of the server in Prometheus' text format
(https://prometheus.io/docs/instrumenting/exposition_formats/)."""

import bisect
import collections
from collections.abc import Iterator

from tformer_jax.serving.worker import Load

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
"""Upper bounds of histogram buckets."""


class Histogram:
    """Counts observations, in seconds, by bucket."""

    def __init__(self) -> None:
        self._counts = [0] * (len(SECONDS) + 1)
        self._sum = 0.0

    def observe(self, seconds: float) -> None:
        """Counts one observation."""
        self._counts[bisect.bisect_left(SECONDS, seconds)] += 1
        self._sum += seconds

    def lines(self, name: str, meaning: str) -> Iterator[str]:
        """Yields the cumulative buckets, the sum and the count."""
        yield from head(name, "histogram", meaning)
        total = 0
        for bound, count in zip((*map(str, SECONDS), "+Inf"), self._counts, strict=True):
            total += count
            yield f'{name}_bucket{{le="{bound}"}} {total}'
        yield f"{name}_sum {self._sum}"
        yield f"{name}_count {total}"


class Metrics:
    """Metrics that the event loop records; the engine's are in its `Load`."""

    def __init__(self) -> None:
        self.answered: collections.Counter[tuple[str, int]] = collections.Counter()
        """Number of HTTP requests by route and status; 499: the client disconnected before the end of the response."""
        self.first_token = Histogram()
        self.request = Histogram()

    def text(self, load: Load) -> str:
        """Returns all metrics, one sample per line."""
        return "".join(f"{line}\n" for line in self._lines(load))

    def _lines(self, load: Load) -> Iterator[str]:
        name = "tformer_requests_total"
        yield from head(name, "counter", "HTTP requests by route and status; 499: the client disconnected.")
        for (route, status), count in sorted(self.answered.items()):
            yield f'{name}{{route="{route}",status="{status}"}} {count}'
        yield from single("tformer_requests_running", "gauge", "Requests in the engine's slots.", load.running)
        yield from single("tformer_requests_waiting", "gauge", "Requests that wait for a slot.", load.waiting)
        yield from single("tformer_tokens_generated_total", "counter", "Tokens generated.", load.tokens)
        yield from single("tformer_pages_used", "gauge", "Pages of the cache in use.", load.pages_used)
        yield from single("tformer_pages", "gauge", "Pages of the cache.", load.pages)
        yield from self.first_token.lines("tformer_first_token_seconds", "Time from the request to its first token.")
        yield from self.request.lines("tformer_request_seconds", "Time from the request to its last result.")


def head(name: str, kind: str, meaning: str) -> Iterator[str]:
    """Yields the two header lines of a metric."""
    yield f"# HELP {name} {meaning}"
    yield f"# TYPE {name} {kind}"


def single(name: str, kind: str, meaning: str, value: int) -> Iterator[str]:
    """Yields a metric with one sample."""
    yield from head(name, kind, meaning)
    yield f"{name} {value}"
