"""Watches the metrics of finished steps: spikes of the loss, and steps that are not finite."""

import collections
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax

from tformer_jax.train.meter import STEPS_AHEAD, Values

Batch = Mapping[str, jax.Array]


class NotFinite(Exception):
    """Successive steps up to `step`, `steps` of them, had a non-finite loss or gradient; `batch` is the last one's."""

    def __init__(self, steps: int, step: int, batch: Batch):
        super().__init__(f"{steps} consecutive steps up to step {step} had a non-finite loss or gradient")
        self.steps, self.step, self.batch = steps, step, batch


class StepMonitor:
    """Checks steps once their metrics are known, which is up to `STEPS_AHEAD` steps later.

    Args:
        checked: the last step that has been checked.
        skipped: number of successive steps without a finite loss and gradient that end a run.
        report: is called with a step, the kind of an event, "spike" or "skipped", and a sentence.
    """

    def __init__(self, spikes: "SpikeDetector", *, checked: int, skipped: int, report: Callable[[int, str, str], None]):
        self.spikes, self.checked = spikes, checked
        self._skipped, self._report = skipped, report
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
            if values["skipped"] >= self._skipped:
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
