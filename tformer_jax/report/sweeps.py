"""Results of a sweep: choice by validation, means over seeds with confidence intervals, and the record of both.

A combination is the settings of one run, `NAME=VALUE` each. A group is the runs that differ only in their seed.
"""

import math
import statistics
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from scipy import special

from tformer_jax.config import LOWER_IS_BETTER

Combination = tuple[str, ...]
Results = Mapping[Combination, Mapping[str, Any]]
"""The contents of `result.json` of each run, its `validation` metrics, and `tokens_per_second`."""
CONFIDENCE = 0.95


def without(combination: Combination, *names: str) -> Combination:
    """Returns the settings of a combination other than `names`."""
    return tuple(part for part in combination if part.partition("=")[0] not in names)


def chosen(results: Results, setting: str, metric: str) -> set[Combination]:
    """Returns, for each combination of the other settings, the one whose value of `setting` is best on validation.

    Args:
        results: runs with one seed.
        metric: the validation metric that decides; a run where it is not finite is worse than all others.

    Returns:
        The best combinations, without their seed.
    """
    groups: dict[Combination, list[Combination]] = {}
    for found in results:
        groups.setdefault(without(found, setting, "seed"), []).append(found)
    return {
        without(min(group, key=lambda found: badness(results[found]["validation"][metric], metric)), "seed")
        for group in groups.values()
    }


def badness(value: float | None, metric: str) -> float:
    """Returns a number that is smaller for better values of a metric; infinity for None and other non-finite values."""
    if value is None or not math.isfinite(value):
        return math.inf
    return value if metric in LOWER_IS_BETTER else -value


def interval(values: Sequence[float | None]) -> float | None:
    """Returns half the width of Student's 95 % confidence interval of the mean; None for one value, or with a None."""
    deviation = _deviation(values)
    if deviation is None or len(values) < 2:
        return None
    quantile = float(special.stdtrit(len(values) - 1, (1 + CONFIDENCE) / 2))
    return quantile * deviation / math.sqrt(len(values))


def formatted(mean: float | None, half: float | None) -> str:
    """Returns a mean and half of its interval as text."""
    if mean is None:
        return "not finite"
    return f"{mean:.4g}" + (f" ± {half:.2g}" if half is not None else "")


def record(results: Results, *, of: Collection[Combination] | None = None) -> dict[str, Any]:
    """Returns the statistics of each group and the facts of each run.

    Args:
        of: combinations without seeds, to whose groups the statistics are limited; None: all.

    Returns:
        `groups`, with the means of the test metrics over seeds, their standard deviations and intervals (None if a run
        has no finite value), and the mean of the training speeds; `common`, the facts in which all runs agree; `runs`,
        the others.
    """
    members: dict[Combination, list[Mapping[str, Any]]] = {}
    for found, result in results.items():
        members.setdefault(without(found, "seed"), []).append(result)
    facts = [{name: value for name, value in result.items() if name != "command"} for result in results.values()]
    common = {name: value for name, value in facts[0].items() if all(one.get(name) == value for one in facts)}
    runs = [
        {"settings": found, **{name: value for name, value in one.items() if name not in common}}
        for found, one in zip(results, facts, strict=True)
    ]
    groups = [_group(found, group) for found, group in members.items() if of is None or found in of]
    return {"groups": groups, "common": common, "runs": runs}


def _group(settings: Combination, results: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    values = {name: [result["test"][name] for result in results] for name in results[0]["test"]}
    return {
        "settings": settings,
        "seeds": len(results),
        "parameters": results[0]["parameters"],
        "tokens_per_second": statistics.mean(result["tokens_per_second"] for result in results),
        "mean": {name: _mean(of) for name, of in values.items()},
        "deviation": {name: _deviation(of) for name, of in values.items()},
        "interval": {name: interval(of) for name, of in values.items()},
    }


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.mean(known) if len(known) == len(values) else None


def _deviation(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    if len(known) < len(values):
        return None
    return statistics.stdev(known) if len(known) > 1 else 0.0
