"""Which evaluation was the best, and whether to go on."""

import math
from typing import Any

from tformer_jax.config import LOWER_IS_BETTER, TrainConfig


class BestMetric:
    """Follows `train.metric`; `evaluations_since` the best one are counted against `train.patience`."""

    def __init__(self, cfg: TrainConfig, *, score: float | None = None, evaluations_since: int = 0):
        self._cfg, self._best, self.evaluations_since = cfg, score, evaluations_since

    def state(self) -> dict[str, Any]:
        """The keyword arguments of one that goes on from here."""
        return {"score": self._best, "evaluations_since": self.evaluations_since}

    def score(self, metrics: dict[str, float]) -> float:
        """How good an evaluation is: higher is better, and nothing is worse than what is no number."""
        value = metrics[self._cfg.metric]
        if not math.isfinite(value):
            return -math.inf
        return -value if self._cfg.metric in LOWER_IS_BETTER else value

    def update(self, metrics: dict[str, float]) -> None:
        """Takes the next evaluation."""
        score = self.score(metrics)
        if self._best is None or score > self._best:
            self._best, self.evaluations_since = (score if math.isfinite(score) else None), 0
        else:
            self.evaluations_since += 1

    @property
    def exhausted(self) -> bool:
        """Whether patience is at its end."""
        return 0 < self._cfg.patience <= self.evaluations_since
