"""Early stopping on a validation metric (`train.metric`, `train.patience`)."""

import math
from typing import Any

from tformer_jax.config import TrainConfig, lower_is_better
from tformer_jax.config.metrics import base_metric, group_of_metric


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
