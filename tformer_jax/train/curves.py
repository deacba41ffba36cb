"""Learning curves of a run, short enough for a record."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

MOST_POINTS = 100
"""Maximum number of points of a curve, the first and the last record among them."""
OF_TRAINING = ("step", "tokens", "seconds", "loss", "nll")
"""Metrics of training in a curve."""
Curve = dict[str, list[float | None]]
"""Values by metric, of equal lengths; None where a record has no finite value."""


def read(run: Path) -> dict[str, Curve]:
    """Returns the curves of a run folder: `train`, and `validation` with the training tokens at each evaluation.

    They are empty without `metrics.jsonl`.
    """
    path = run / "metrics.jsonl"
    records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []
    train = [record for record in records if record["group"] == "train"]
    tokens = {record["step"]: record.get("tokens") for record in train}
    validation = [
        {"tokens": tokens.get(record["step"]), **record} for record in records if record["group"] == "validation"
    ]
    names = dict.fromkeys(name for record in validation for name in ("step", *record) if name != "group")
    return {"train": _curve(train, OF_TRAINING), "validation": _curve(validation, list(names))}


def _curve(records: Sequence[Mapping[str, Any]], names: Sequence[str]) -> Curve:
    """Returns `names` of evenly spaced records, rounded to six digits."""
    places = np.unique(np.linspace(0, len(records) - 1, min(MOST_POINTS, len(records))).round().astype(int))
    chosen = [records[place] for place in places]
    present = [name for name in names if any(name in record for record in chosen)]
    return {name: [_rounded(record.get(name)) for record in chosen] for name in present}


def _rounded(value: float | None) -> float | None:
    return value if value is None or isinstance(value, int) else float(f"{value:.6g}")
