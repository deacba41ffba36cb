"""Series of metrics: reading, downsampling for charts, and CSV."""

import csv
import dataclasses
import io
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

MAX_POINTS = 1200
"""Maximum number of points of a line in a chart."""
KEPT = 3
"""Points kept of each bucket: the smallest value, the largest, and a missing one."""


@dataclasses.dataclass(frozen=True)
class Series:
    """Metrics by step."""

    steps: np.ndarray
    """int64 [records]."""
    columns: dict[str, np.ndarray]
    """float64 [records] by metric; NaN where a record has no finite number."""

    @classmethod
    def empty(cls) -> "Series":
        """Returns a series without records."""
        return cls(np.zeros(0, np.int64), {})

    @classmethod
    def from_records(cls, records: Sequence[Mapping[str, Any]]) -> "Series":
        """Collects records such as `{"step": 1, "loss": 0.5}`; null and missing values become NaN."""
        names = dict.fromkeys(name for record in records for name in record if name != "step")
        columns = {name: np.array([_number(record.get(name)) for record in records], np.float64) for name in names}
        return cls(np.array([record["step"] for record in records], np.int64), columns)

    def last(self, name: str) -> float | None:
        """Returns the last finite value of a metric, or None."""
        values = self.columns.get(name, np.zeros(0))
        finite = values[np.isfinite(values)]
        return float(finite[-1]) if len(finite) else None

    def final(self, name: str) -> float | None:
        """Returns the value of a metric in the last record; None if it has no finite one."""
        values = self.columns.get(name, np.zeros(0))
        return float(values[-1]) if np.isfinite(values[-1:]).any() else None

    def records(self) -> list[dict[str, Any]]:
        """Returns a record per step, with None for NaN."""
        rows = zip(*self.columns.values(), strict=True) if self.columns else ([] for _ in self.steps)
        return [
            {"step": int(step), **{name: _value(value) for name, value in zip(self.columns, row, strict=True)}}
            for step, row in zip(self.steps, rows, strict=True)
        ]


def downsample_indices(values: np.ndarray, limit: int = MAX_POINTS) -> np.ndarray:
    """Returns the rising indices of at most `limit` values that keep a line's extremes, ends and gaps.

    The values are divided into equal buckets; each keeps its smallest and its largest value, and the first NaN.
    """
    if len(values) <= limit:
        return np.arange(len(values))
    places = {0, len(values) - 1}
    for bucket in _buckets(len(values), limit):
        here = values[bucket]
        finite = np.isfinite(here)
        if finite.any():
            places |= {int(bucket[np.nanargmin(here)]), int(bucket[np.nanargmax(here)])}
        if not finite.all():
            places.add(int(bucket[np.argmin(finite)]))
    return np.array(sorted(places))


def bucket_means(values: np.ndarray, limit: int = MAX_POINTS) -> np.ndarray:
    """Returns the mean of each bucket of `downsample_indices`: what to smooth without the extremes' bias."""
    means = np.array(values, np.float64)
    if len(values) > limit:
        for bucket in _buckets(len(values), limit):
            finite = values[bucket][np.isfinite(values[bucket])]
            means[bucket] = finite.mean() if len(finite) else np.nan
    return means[downsample_indices(values, limit)]


def to_csv(records: Sequence[Mapping[str, Any]]) -> str:
    """Returns records as CSV, with a header of all their keys; None becomes an empty cell."""
    names = list(dict.fromkeys(name for record in records for name in record))
    file = io.StringIO()
    writer = csv.DictWriter(file, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(records)
    return file.getvalue()


def _buckets(size: int, limit: int) -> list[np.ndarray]:
    return np.array_split(np.arange(size), max((limit - 2) // KEPT, 1))


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else np.nan


def _value(value: float) -> float | int | None:
    if not np.isfinite(value):
        return None
    return int(value) if value.is_integer() else float(value)
