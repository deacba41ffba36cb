"""Early stopping on a validation metric (`train.metric`, `train.patience`)."""

import math
from typing import Any

from tformer_jax.config import LOWER_IS_BETTER, TrainConfig


class BestMetric:
    """Tracks the best `train.metric`, and for `train.patience` the evaluations since then.

    A metric that is not finite is never the best.
    """

    def __init__(self, cfg: TrainConfig, *, score: float | None = None, evaluations_since: int = 0):
        self._cfg, self._best, self.evaluations_since = cfg, score, evaluations_since

    def state(self) -> dict[str, Any]:
        """The keyword arguments of one that goes on from here."""
        return {"score": self._best, "evaluations_since": self.evaluations_since}

    def score(self, metrics: dict[str, float]) -> float:
        """The metric with the sign that makes higher better; -inf where it is not finite."""
        value = metrics[self._cfg.metric]
        if not math.isfinite(value):
            return -math.inf
        return -value if self._cfg.metric in LOWER_IS_BETTER else value

    def update(self, metrics: dict[str, float]) -> None:
        """Counts the next evaluation."""
        score = self.score(metrics)
        if math.isfinite(score) and (self._best is None or score > self._best):
            self._best, self.evaluations_since = score, 0
        else:
            self.evaluations_since += 1

    @property
    def exhausted(self) -> bool:
        """Whether `train.patience` evaluations in a row brought no better metric."""
        return 0 < self._cfg.patience <= self.evaluations_since
