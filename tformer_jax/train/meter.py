"""Averages of step metrics between two records, and a run's totals of tokens and seconds."""

import time

import jax
import numpy as np

STEPS_AHEAD = 2
"""Steps that may wait for the device: enough to keep it busy, few enough that a full loader stays full."""


class Meter:
    """Collects the metrics of steps that the device still computes; `read` fetches them all at once.

    `tokens`, `seconds` and `data_wait_seconds` are the run's totals, carried over when it is resumed.
    """

    def __init__(self, *, tokens: int = 0, seconds: float = 0.0, data_wait_seconds: float = 0.0):
        self.tokens, self._seconds, self._waited = tokens, seconds, data_wait_seconds
        self._born = self._since = time.perf_counter()
        self._tokens_before, self._waited_before = tokens, data_wait_seconds
        self._pending: list[dict[str, jax.Array]] = []

    @property
    def seconds(self) -> float:
        """Wall time of the run so far, evaluations and checkpoints included."""
        return self._seconds + time.perf_counter() - self._born

    def totals(self) -> dict[str, float]:
        """The arguments of a meter that goes on from here."""
        return {"tokens": self.tokens, "seconds": self.seconds, "data_wait_seconds": self._waited}

    def add(self, metrics: dict[str, jax.Array], tokens: int, waited: float) -> None:
        """Takes the metrics of one step on `tokens` real tokens, for which no batch was ready for `waited` seconds.

        Waits for the device until at most `STEPS_AHEAD` steps are left to compute.
        """
        self._pending.append(metrics)
        self.tokens += tokens
        self._waited += waited
        jax.block_until_ready(self._pending[:-STEPS_AHEAD][-1:])

    def restart(self) -> None:
        """Leaves what happened since the last `read` out of the next speed."""
        self._since, self._tokens_before, self._waited_before = time.perf_counter(), self.tokens, self._waited

    def read(self) -> dict[str, float]:
        """Mean loss (by label), mean gradient norm, speed and share of time spent waiting since the last `read`.

        At least one step lies between.
        """
        fetched = jax.device_get(self._pending)
        elapsed = time.perf_counter() - self._since
        speed = (self.tokens - self._tokens_before) / elapsed
        waited = (self._waited - self._waited_before) / elapsed
        losses, labels, norms = (
            np.array([metrics[name] for metrics in fetched], np.float64) for name in ("loss", "labels", "grad_norm")
        )
        self._pending = []
        self.restart()
        return {
            "loss": float((losses * labels).sum() / max(labels.sum(), 1)),
            "grad_norm": float(norms.mean()),
            "tokens_per_second": speed,
            "data_wait_percent": 100 * waited,
        }
