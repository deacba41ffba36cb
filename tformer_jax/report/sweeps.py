"""Results of a sweep: choice by validation, means over seeds with confidence intervals, and the record of both.

A combination is the settings of one run, `NAME=VALUE` each. A group is the runs that differ only in their seed.
"""

import math
import statistics
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
from scipy import special

from tformer_jax.config import lower_is_better

Combination = tuple[str, ...]
Results = Mapping[Combination, Mapping[str, Any]]
"""The contents of `result.json` of each run, its `validation` metrics, `tokens_per_second` and `curves`."""
CONFIDENCE = 0.95


def without_setting(combination: Combination, *names: str) -> Combination:
    """Returns the settings of a combination other than `names`."""
    return tuple(part for part in combination if part.partition("=")[0] not in names)


def chosen_combinations(results: Results, setting: str, metric: str) -> set[Combination]:
    """Returns the combinations with the best value of `setting` on validation, one for each combination of the others.

    Args:
        results: runs with one seed.
        metric: the validation metric that decides; a run where it is not finite is worse than all others.

    Returns:
        The best combinations, without their seed.
    """
    groups: dict[Combination, list[Combination]] = {}
    for combination in results:
        groups.setdefault(without_setting(combination, setting, "seed"), []).append(combination)
    return {
        without_setting(
            min(group, key=lambda combination: badness(results[combination]["validation"].get(metric), metric)), "seed"
        )
        for group in groups.values()
    }


def badness(value: float | None, metric: str) -> float:
    """Returns a number that is smaller for better values of a metric; infinity for None and other non-finite values."""
    if value is None or not math.isfinite(value):
        return math.inf
    return value if lower_is_better(metric) else -value


def interval(values: Sequence[float | None]) -> float | None:
    """Returns half the width of Student's 95 % confidence interval of the mean; None for one value, or any None."""
    deviation = _deviation(values)
    if deviation is None:
        return None
    quantile = float(special.stdtrit(len(values) - 1, (1 + CONFIDENCE) / 2))
    return quantile * deviation / math.sqrt(len(values))


def format_mean(mean: float | None, half: float | None) -> str:
    """Returns a mean and half of its interval as text."""
    if mean is None:
        return "no value"
    return f"{mean:.4g}" + (f" ± {half:.2g}" if half is not None else "")


def make_record(results: Results, metric: str, *, only: Collection[Combination] | None = None) -> dict[str, Any]:
    """Returns the statistics of each group and the facts of each run.

    Args:
        metric: the validation metric that is also compared at an equal time of training.
        only: combinations without seeds whose groups get statistics; None: all.

    Returns:
        `groups`, with the means of the test metrics over seeds, their standard deviations and intervals (None if a run
        has no finite value, or is the only one), the mean of the training speeds, and the validation `metric` after
        `equal_seconds` of training, if the curves have it; `common`, the facts in which all runs agree; `runs`, the
        others.
    """
    members: dict[Combination, list[Mapping[str, Any]]] = {}
    for combination, result in results.items():
        members.setdefault(without_setting(combination, "seed"), []).append(result)
    facts = [{name: value for name, value in result.items() if name != "command"} for result in results.values()]
    common = {name: value for name, value in facts[0].items() if all(fact.get(name) == value for fact in facts)}
    runs = [
        {"settings": combination, **{name: value for name, value in fact.items() if name not in common}}
        for combination, fact in zip(results, facts, strict=True)
    ]
    members = {combination: group for combination, group in members.items() if only is None or combination in only}
    groups = [_group(combination, group) for combination, group in members.items()]
    seconds, values = at_equal_time(list(members.values()), metric)
    for group, at in zip(groups, values, strict=False):
        group["at_equal_seconds"] = {"mean": statistics.mean(at), "interval": interval(at)}
    return {"groups": groups, "equal_seconds": seconds, "common": common, "runs": runs}


def at_equal_time(groups: Sequence[Sequence[Mapping[str, Any]]], metric: str) -> tuple[float | None, list[list[float]]]:
    """Interpolates the validation curves of runs at the time when the fastest group finished.

    The time of a run is its tokens over the mean training speed of its group, so that evaluations do not count.

    Returns:
        The seconds, and the values of each run by group; None and no values if a curve does not cover that time.
    """
    speeds = [statistics.mean(run["tokens_per_second"] for run in group) for group in groups]
    lines = [[_line(run, metric, speed) for run in group] for group, speed in zip(groups, speeds, strict=True)]
    every = [line for group in lines for line in group]
    if len(groups) < 2 or not all(line.size and np.isfinite(line).all() for line in every):
        return None, []
    seconds = min(times[-1] for times, _ in every)
    if seconds < max(times[0] for times, _ in every):
        return None, []
    return float(seconds), [[float(np.interp(seconds, *line)) for line in group] for group in lines]


def _line(run: Mapping[str, Any], metric: str, speed: float) -> np.ndarray:
    """Returns the times of a run's evaluations, in seconds of training, and the metric: float64 [2, evaluations]."""
    curve = run.get("curves", {}).get("validation", {})
    if metric not in curve:
        return np.zeros((2, 0))
    return np.array([curve["tokens"], curve[metric]], np.float64) / [[speed], [1.0]]


def _group(settings: Combination, results: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    names = dict.fromkeys(name for result in results for name in result["test"])
    values = {name: [result["test"].get(name) for result in results] for name in names}
    return {
        "settings": settings,
        "seeds": len(results),
        "parameters": results[0]["parameters"],
        "tokens_per_second": statistics.mean(result["tokens_per_second"] for result in results),
        "mean": {name: _mean(results) for name, results in values.items()},
        "deviation": {name: _deviation(results) for name, results in values.items()},
        "interval": {name: interval(results) for name, results in values.items()},
    }


def _mean(values: Sequence[float | None]) -> float | None:
    finite = [value for value in values if value is not None]
    return statistics.mean(finite) if len(finite) == len(values) else None


def _deviation(values: Sequence[float | None]) -> float | None:
    finite = [value for value in values if value is not None]
    return statistics.stdev(finite) if len(finite) == len(values) > 1 else None
