"""Averages step metrics between log records, and totals the tokens, FLOPs and seconds of a run."""

import math
import threading
import time
from typing import Any

import jax
import numpy as np

from tformer_jax.train.step_metrics import StepMetrics, fetch

EVENTS = "/jax/core/compile/"
"""Begin of the names under which JAX reports the seconds of tracing, lowering and compiling a function."""


class CompileTime:
    """The time in which any thread traces, lowers or compiles: nested and simultaneous events count once."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._intervals: list[tuple[float, float]] = []
        """Disjoint begins and ends, in order."""
        self._lock = threading.Lock()

    def add(self, begin: float, end: float) -> None:
        """Adds an event that has just ended."""
        with self._lock:
            while self._intervals and self._intervals[-1][1] > begin:
                earlier, until = self._intervals.pop()
                self.seconds -= until - earlier
                begin, end = min(begin, earlier), max(end, until)
            self._intervals.append((begin, end))
            self.seconds += end - begin


_compile_time = CompileTime()


def _add(event: str, duration_secs: float, **_: str | int) -> None:
    if event.startswith(EVENTS):
        end = time.perf_counter()
        _compile_time.add(end - duration_secs, end)


jax.monitoring.register_event_duration_secs_listener(_add)


def compile_seconds() -> float:
    """Returns the seconds in which this process has traced, lowered or compiled."""
    return _compile_time.seconds


STEPS_AHEAD = 2
"""Maximum number of steps in flight: enough to keep the device busy, few enough not to drain the loader."""

Values = dict[str, float]


class Meter:
    """Collects the metrics of steps that the device may still compute, and fetches them once they are ready.

    The arguments are what `state` returned in the run that is resumed: the totals, and `waiting`, the fetched metrics
    that have not been averaged.
    """

    def __init__(
        self,
        *,
        tokens: int = 0,
        flops: float = 0.0,
        seconds: float = 0.0,
        data_wait_seconds: float = 0.0,
        skipped_steps: int = 0,
        waiting: list[Values] | None = None,
    ):
        self.tokens, self.flops, self._seconds, self._waited = tokens, flops, seconds, data_wait_seconds
        self.skipped_steps = skipped_steps
        self._started = time.perf_counter()
        self._computing: list[StepMetrics] = []
        self._done: list[Values] = list(waiting or [])
        self._read = (0.0, 0)
        self.restart()

    @property
    def seconds(self) -> float:
        """Wall time of the run so far, in seconds, evaluations and checkpoints included."""
        return self._seconds + time.perf_counter() - self._started

    @property
    def seconds_per_step(self) -> float:
        """Mean time of the steps of this process that `read` has averaged."""
        seconds, steps = self._read
        return seconds / max(steps, 1)

    @property
    def unread(self) -> bool:
        """Whether `read` has not yet averaged all steps."""
        return bool(self._computing or self._done)

    def totals(self) -> dict[str, float]:
        """Returns the totals of the run so far."""
        return {
            "tokens": self.tokens,
            "flops": self.flops,
            "seconds": self.seconds,
            "data_wait_seconds": self._waited,
            "skipped_steps": self.skipped_steps,
        }

    def state(self) -> dict[str, Any]:
        """Returns the keyword arguments that recreate this meter; call `fetch_all` first."""
        return {**self.totals(), "waiting": list(self._done)}

    def add(self, metrics: StepMetrics, *, flops: float = 0.0, waited: float) -> list[Values]:
        """Adds the metrics of one step, which waited `waited` seconds for its batch.

        Blocks until at most `STEPS_AHEAD` steps are in flight; returns the metrics of the steps that finished since
        the last call.
        """
        self._computing.append(metrics)
        self.flops += flops
        self._waited += waited
        values = self._fetch(STEPS_AHEAD)
        self._count_step(waited)
        return values

    def fetch_all(self) -> list[Values]:
        """Blocks until all steps are done; returns the metrics of the steps that finished since the last call."""
        return self._fetch(0)

    def restart(self) -> None:
        """Starts a new interval for the rates that `read` returns."""
        self._since = self._last = time.perf_counter()
        self._compiled_before = self._compiled = compile_seconds()
        self._steps = self._compiling = 0
        self._compiling_seconds = self._compiling_waited = 0.0
        self._before = (self.tokens, self.flops, self._waited)

    def read(self) -> Values:
        """Returns averages and rates over the steps since the last `read`; call `fetch_all` first.

        Rates leave out the time of compilation. Losses are averaged over labels. Skipped steps count only in
        `skipped_steps`.
        """
        elapsed, (seconds, steps) = self._elapsed(), self._read
        self._read = seconds + elapsed, steps + self._steps
        tokens, flops, waited = self._before
        values = _averages(self._done) | {
            "tokens_per_second": (self.tokens - tokens) / elapsed,
            "flops_per_second": (self.flops - flops) / elapsed,
            "data_wait_percent": 100 * self._of_all_steps(self._waited - waited, self._compiling_waited) / elapsed,
        }
        self._done = []
        self.restart()
        return values

    def _count_step(self, waited: float) -> None:
        """Counts a step of the interval, and its time and wait if something was compiled in it."""
        now, compiled = time.perf_counter(), compile_seconds()
        self._steps += 1
        if compiled > self._compiled:
            self._compiling += 1
            self._compiling_seconds += now - self._last
            self._compiling_waited += waited
        self._last, self._compiled = now, compiled

    def _elapsed(self) -> float:
        """Returns the seconds of the interval; a step in which something was compiled takes as long as the others.

        Such a step takes more than the time that JAX reports: it also loads the program and writes the cache.
        """
        elapsed = time.perf_counter() - self._since
        if self._steps == self._compiling:
            return elapsed - (compile_seconds() - self._compiled_before)
        return self._of_all_steps(elapsed, self._compiling_seconds)

    def _of_all_steps(self, seconds: float, compiling: float) -> float:
        """Returns the seconds of the interval if those steps in which something was compiled took as long as others."""
        others = self._steps - self._compiling
        return (seconds - compiling) * self._steps / others if others else seconds

    def _fetch(self, left: int) -> list[Values]:
        ready = self._computing[: len(self._computing) - left]
        self._computing = self._computing[len(ready) :]
        values = fetch(ready)
        self.skipped_steps += sum(step["skipped"] > 0 for step in values)
        self.tokens += sum(int(step["tokens"]) for step in values)
        self._done += values
        return values


def _averages(steps: list[Values]) -> Values:
    """Returns the mean of each metric over the steps that have it: a resume may turn on or off `train.log_norms`."""
    updates = [step for step in steps if not step["skipped"]]
    result = {"loss": math.nan, "grad_norm": math.nan, "skipped_steps": float(len(steps) - len(updates))}
    if updates:
        names = dict.fromkeys(name for step in updates for name in step if name not in ("skipped", "tokens"))
        columns = {name: np.array([step[name] for step in updates if name in step]) for name in names}
        labels = columns.pop("labels")
        by_label = {name: columns.pop(name) for name in ("loss", "nll", "divergence") if name in columns}
        result |= {name: float((column * labels).sum() / max(labels.sum(), 1)) for name, column in by_label.items()}
        result |= {name: float(column.mean()) for name, column in columns.items()}
    if "gradient_squared" in result:
        squared, variance = result.pop("gradient_squared"), result.pop("gradient_variance")
        result["noise_scale"] = variance / squared if squared > 0 else math.inf
    return result
