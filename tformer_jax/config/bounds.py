"""Bounds of settings that are numbers."""

import math
from typing import Any, NamedTuple


class Bounds(NamedTuple):
    """Bounds of a number: `low` and `high` are allowed, `above` and `below` are not; None: no bound."""

    low: float | None
    high: float | None
    above: float | None
    below: float | None

    def problem(self, value: Any) -> str | None:
        """Returns what is wrong with a number, if it is outside of the bounds or not finite."""
        if isinstance(value, float) and not math.isfinite(value):
            return "must be a finite number"
        if self.low is not None and value < self.low:
            return f"must be at least {self.low}"
        if self.high is not None and value > self.high:
            return f"must be at most {self.high}"
        if self.above is not None and value <= self.above:
            return f"must be above {self.above}"
        if self.below is not None and value >= self.below:
            return f"must be below {self.below}"
        return None
