"""Watches the metrics of finished steps: spikes of the loss, and steps that are not finite."""

import collections
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax

from tformer_jax.config import TrainConfig, lower_is_better
from tformer_jax.config.metrics import base_metric, group_of_metric
from tformer_jax.train.meter import STEPS_AHEAD, Values

Batch = Mapping[str, jax.Array]


class NotFinite(Exception):
    """Successive steps up to `step`, `steps` of them, had a non-finite loss or gradient; `batch` is the last one's."""

    def __init__(self, steps: int, step: int, batch: Batch):
        what = f"step {step}" if steps == 1 else f"{steps} consecutive steps up to step {step}"
        super().__init__(f"{what} had a non-finite loss or gradient")
        self.steps, self.step, self.batch = steps, step, batch


class StepMonitor:
    """Checks steps once their metrics are known, which is up to `STEPS_AHEAD` steps later.

    Args:
        checked: the last step that has been checked.
        max_skipped: number of successive steps without a finite loss and gradient that end a run.
        report: is called with a step, the kind of an event, "spike" or "skipped", and a sentence.
    """

    def __init__(
        self, spikes: "SpikeDetector", *, checked: int, max_skipped: int, report: Callable[[int, str, str], None]
    ):
        self.spikes, self.checked = spikes, checked
        self._max_skipped, self._report = max_skipped, report
        self._batches: collections.deque[tuple[int, Batch]] = collections.deque(maxlen=STEPS_AHEAD + 1)

    def remember(self, step: int, batch: Batch) -> None:
        """Keeps the batch of a step that the device computes."""
        self._batches.append((step, batch))

    def check(self, finished: list[Values]) -> None:
        """Reports what the metrics of the next steps show.

        Raises:
            NotFinite: too many successive steps were not finite.
        """
        for values in finished:
            self.checked += 1
            if warning := self.spikes.detect(values["loss"]):
                self._report(self.checked, "spike", warning)
            if values["skipped"]:
                self._report(self.checked, "skipped", "skipped, because its loss or gradient is not finite")
            if values["skipped"] >= self._max_skipped:
                raise NotFinite(int(values["skipped"]), self.checked, dict(self._batches)[self.checked])


class SpikeDetector:
    """Detects losses far above the recent ones, by their running mean and standard deviation.

    `MAX_SPIKES` consecutive spikes count as a lasting rise: the statistics restart from the next loss, and the warnings
    end. Most spikes are shorter.
    """

    DECAY, DEVIATIONS, MIN_STEPS, MIN_RISE, MAX_SPIKES = 0.9, 6.0, 50, 0.5, 20

    def __init__(self, *, mean: float = 0.0, variance: float = 0.0, count: int = 0, spikes: int = 0):
        self._mean, self._variance, self._count, self._spikes = mean, variance, count, spikes

    def state(self) -> dict[str, Any]:
        """Returns the keyword arguments that recreate this detector."""
        return {"mean": self._mean, "variance": self._variance, "count": self._count, "spikes": self._spikes}

    def detect(self, loss: float) -> str | None:
        """Returns a warning if `loss` is a spike, else None; spikes and non-finite losses do not enter the mean."""
        if not math.isfinite(loss):
            return None
        bound = self._mean + max(self.DEVIATIONS * math.sqrt(self._variance), self.MIN_RISE)
        if self._count >= self.MIN_STEPS and loss > bound:
            warning = f"loss {loss:.4f} is far above the {self._mean:.4f} of the preceding steps"
            self._spikes += 1
            if self._spikes == self.MAX_SPIKES:
                self._count = self._spikes = 0
            return warning
        self._spikes = 0
        self._count += 1
        keep = min(self.DECAY, 1 - 1 / self._count)
        difference = loss - self._mean
        self._mean += (1 - keep) * difference
        self._variance = keep * (self._variance + (1 - keep) * difference**2)
        return None


class BestMetric:
    """Tracks the best value of `train.metric` and the number of evaluations since then.

    A non-finite value is never the best.
    """

    def __init__(self, cfg: TrainConfig, *, score: float | None = None, evaluations_since: int = 0):
        self._cfg, self._best, self.evaluations_since = cfg, score, evaluations_since

    def state(self) -> dict[str, Any]:
        """Returns the keyword arguments that recreate this tracker."""
        return {"score": self._best, "evaluations_since": self.evaluations_since}

    def score(self, metrics: dict[str, float]) -> float:
        """Returns the metric, negated if lower is better; -inf if it is not finite.

        Raises:
            ConfigError: the evaluated examples do not have the metric, but have it of other directions or groups.
        """
        if self._cfg.metric not in metrics:
            groups = [group_of_metric(name) for name in metrics if base_metric(name) == base_metric(self._cfg.metric)]
            names = ", ".join(filter(None, groups))
            raise self._cfg.error("metric", f"the evaluated examples have no such direction or group, only {names}")
        value = metrics[self._cfg.metric]
        if not math.isfinite(value):
            return -math.inf
        return -value if lower_is_better(self._cfg.metric) else value

    def update(self, metrics: dict[str, float]) -> None:
        """Records the metrics of one evaluation."""
        score = self.score(metrics)
        if math.isfinite(score) and (self._best is None or score > self._best):
            self._best, self.evaluations_since = score, 0
        else:
            self.evaluations_since += 1

    @property
    def exhausted(self) -> bool:
        """Whether the last `train.patience` evaluations did not improve the metric; False if patience is 0."""
        return 0 < self._cfg.patience <= self.evaluations_since
