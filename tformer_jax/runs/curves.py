"""Learning curves of a run, short enough for a record."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tformer_jax.base.numbers import significant
from tformer_jax.runs.run_folder import read_records

MAX_POINTS = 100
"""Maximum number of points of a curve, the first and the last record among them."""
TRAIN_METRICS = ("step", "tokens", "seconds", "loss", "nll")
"""Metrics of training in a curve."""
DIGITS = 6
Curve = dict[str, list[float | None]]
"""Values by metric, of equal lengths; None where a record has no finite value."""


def summarize_curves(run: Path) -> dict[str, Curve]:
    """Returns the curves `train` and `validation` of a run, thinned to `MAX_POINTS` points and rounded.

    The points of `validation` have the training tokens at each evaluation.

    They are empty without `metrics.jsonl`.
    """
    records = read_records(run / "metrics.jsonl")
    train = [record for record in records if record.get("group") == "train"]
    validation = [
        {"tokens": _tokens(train, record["step"]), **record}
        for record in records
        if record.get("group") == "validation"
    ]
    names = dict.fromkeys(name for record in validation for name in ("step", *record) if name != "group")
    return {"train": _curve(train, TRAIN_METRICS), "validation": _curve(validation, list(names))}


def history(run: Path) -> dict[str, np.ndarray]:
    """Returns the metrics of a run as columns of equal length, with a row for each recorded step.

    `step` is int64, the others float64, with NaN where a step has no value. Metrics of training have their names,
    others begin with their split, as in `validation/loss`.
    """
    rows: dict[int, dict[str, Any]] = {}
    for record in read_records(run / "metrics.jsonl"):
        split = record.get("group", "train")
        values = {name: value for name, value in record.items() if name not in ("step", "group")}
        row = rows.setdefault(record["step"], {"step": record["step"]})
        row |= values if split == "train" else {f"{split}/{name}": value for name, value in values.items()}
    return columns([rows[step] for step in sorted(rows)])


def columns(records: Sequence[Mapping[str, Any]]) -> dict[str, np.ndarray]:
    """Returns records with `step` as columns of equal length; see `history`."""
    names = dict.fromkeys(name for record in records for name in record if name != "step")
    values = {name: [record.get(name) for record in records] for name in names}
    return {"step": np.array([record["step"] for record in records], np.int64)} | {
        name: np.array([np.nan if value is None else value for value in column], np.float64)
        for name, column in values.items()
    }


def _tokens(train: Sequence[Mapping[str, Any]], step: int) -> int | None:
    """Returns the training tokens up to a step, interpolated between records; None without records of tokens."""
    known = [record for record in train if "tokens" in record]
    steps, tokens = ([0, *(record[name] for record in known)] for name in ("step", "tokens"))
    return round(float(np.interp(step, steps, tokens))) if known else None


def _curve(records: Sequence[Mapping[str, Any]], names: Sequence[str]) -> Curve:
    """Returns `names` of evenly spaced records, rounded to `DIGITS` significant digits."""
    places = np.unique(np.linspace(0, len(records) - 1, min(MAX_POINTS, len(records))).round().astype(int))
    chosen = [records[place] for place in places]
    present = [name for name in names if any(name in record for record in chosen)]
    return {name: significant([record.get(name) for record in chosen], DIGITS) for name in present}
