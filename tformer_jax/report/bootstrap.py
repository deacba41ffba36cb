"""Confidence intervals as sacreBLEU computes them, and paired two-sided tests, by bootstrap resampling."""

import dataclasses
import math
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from sacrebleu.significance import estimate_ci

from tformer_jax.base.errors import UserError
from tformer_jax.config import EvalConfig, kinds
from tformer_jax.config.metrics import Metric, build_metric
from tformer_jax.report.outputs import Outputs
from tformer_jax.tasks.metrics.bleu import Bleu
from tformer_jax.tasks.task import Task

RESAMPLES = 1000
PERCENT = 100.0
SEED = 12345
"""sacreBLEU's seed."""
ROUNDING = 1e-9
"""Relative rounding error of differences that are equal."""


@dataclasses.dataclass(frozen=True)
class Estimate:
    """A metric of one system, with its 95 % interval: `mean - half` to `mean + half`, within `lowest` to `highest`."""

    score: float
    mean: float
    half: float
    p_value: float | None = None
    """Of the difference from the baseline, two-sided; None for the baseline."""
    lowest: float = 0.0
    """Smallest possible value."""
    highest: float = math.inf
    """Largest possible value."""

    @property
    def low(self) -> float:
        """The lower end of the interval."""
        return max(self.mean - self.half, self.lowest)

    @property
    def high(self) -> float:
        """The upper end of the interval."""
        return min(self.mean + self.half, self.highest)


def estimates(systems: Sequence[Outputs], task: Task, resamples: int = RESAMPLES) -> dict[str, list[Estimate]]:
    """Returns the loss, and the metrics of translations or the accuracy of labels, for each system.

    Translations in several directions have metrics of each direction, such as `chrf:en-de`, and their means: as in an
    evaluation, over the directions that have the metric.

    The first system is the baseline of the paired bootstrap test (Koehn, 2004). All systems share the resamples, and
    must have the same references. The loss needs losses of the same parts in all systems.

    The p-value is two-sided: the share of resamples whose difference d satisfies `|d - observed| >= |observed|` (Efron
    and Tibshirani, 1993, chapter 16), with the minimum of `two_sided`. sacreBLEU's test rejects about twice as often,
    because it takes absolute differences before it centers them.
    """
    results: dict[str, list[Estimate]] = {}
    labels = systems[0].labels
    if len(labels) and all(np.array_equal(system.labels, labels) for system in systems):
        results["loss"] = ratio([system.nll for system in systems], labels, resamples)
    if task.references is None or not systems[0].texts:
        return results
    if task.references == "labels":
        hits = [PERCENT * system.hits for system in systems]
        return results | {"accuracy": ratio(hits, np.ones(len(hits[0])), resamples, PERCENT)}
    directions = dict.fromkeys(systems[0].directions)
    parts = {
        direction: _of_translations([system.of_direction(direction) for system in systems], direction, resamples)
        for direction in directions
    }
    for name in dict.fromkeys(name for part in parts.values() for name in part):
        own = {direction: part[name] for direction, part in parts.items() if name in part}
        if len(own) == len(parts) or all(_directions_with(name, system) == {*own} for system in systems):
            results[name] = _compared(*_mean([*own.values()]))
    for direction, part in parts.items():
        if direction is not None:
            results |= {f"{name}:{direction}": _compared(*estimates) for name, estimates in part.items()}
    return results


def _directions_with(name: str, system: Outputs) -> set[str | None]:
    """Returns the directions of outputs for which a system stored a metric."""
    return {direction for direction, row in zip(system.directions, system.metrics, strict=False) if name in row}


class Sampled(NamedTuple):
    """Scores of systems, and of their resamples."""

    scores: np.ndarray
    """float64 [systems]."""
    samples: np.ndarray
    """float64 [systems, resamples]."""
    lowest: float
    """Smallest possible value."""
    highest: float
    """Largest possible value."""
    size: int
    """Number of examples."""


def _of_translations(systems: Sequence[Outputs], direction: str | None, resamples: int) -> dict[str, Sampled]:
    """Returns the metrics of translations in one direction by name, in the order of `kinds.METRICS`.

    Includes metrics that all systems stored, metrics that need no signature (chrF and exact match), and BLEU, chrF++
    and TER if the baseline's signatures name them.
    """
    measured: dict[str, Sampled] = {}
    stored = set.intersection(*({*row} for system in systems for row in system.metrics or [{}]))
    for name in dict.fromkeys([*kinds.METRICS, *sorted(stored)]):
        if name in stored:
            values = [np.array([row[name] for row in system.metrics], np.float64) for system in systems]
            kind = kinds.load(kinds.METRICS, name) if name in kinds.METRICS else Metric
            measured[name] = _ratio(values, np.ones(len(values[0])), resamples, *getattr(kind, "bounds", Metric.bounds))
        elif metric := _recomputed(name, systems[0].signatures, direction):
            rows = [
                metric.statistics(system.sources, system.texts, [(text,) for text in system.references])
                for system in systems
            ]
            measured[name] = _by_metric(rows, metric, resamples)
    return measured


def _recomputed(name: str, signatures: dict[str, str], direction: str | None) -> Metric | None:
    """Returns a metric that is computed again; None if a signature says too little, or the run did not have it."""
    if name == "bleu":
        return bleu_of(signatures, direction)
    known = name in signatures or f"{name}:{direction}" in signatures
    if name in ("chrf", "exact_match") or (known and name in ("chrf++", "ter")):
        return build_metric(EvalConfig(), name, "")
    return None


def _mean(parts: Sequence[Sampled]) -> Sampled:
    """Returns the mean over directions."""
    scores = np.mean([part.scores for part in parts], axis=0)
    samples, size = np.mean([part.samples for part in parts], axis=0), sum(part.size for part in parts)
    return parts[0]._replace(scores=scores, samples=samples, size=size)


def _by_metric(systems: Sequence[np.ndarray], metric: Metric, resamples: int) -> Sampled:
    """Returns the scores of systems, given the statistics of their texts: float64 [N, S] each."""
    drawn = _draws(len(systems[0]), resamples)
    sampled = np.array([[metric.score(rows[places].sum(axis=0)) for rows in systems] for places in drawn])
    scores = np.array([metric.score(rows.sum(axis=0)) for rows in systems])
    return Sampled(scores, sampled.T, *metric.bounds, len(systems[0]))


def bleu_of(signatures: dict[str, str], direction: str | None = None) -> Metric | None:
    """Returns BLEU with the tokenizer that a signature names; None without a signature or the tokenizer's package."""
    signature = signatures.get(f"bleu:{direction}") or signatures.get("bleu", "")
    tokenizer = re.search(r"tok:(ja-mecab|ko-mecab|[\w-]+)", signature)
    try:
        return Bleu(EvalConfig(bleu_tokenize=tokenizer[1]), "") if tokenizer else None
    except UserError:
        return None


def ratio(
    systems: Sequence[np.ndarray], counts: np.ndarray, resamples: int = RESAMPLES, highest: float = math.inf
) -> list[Estimate]:
    """Returns `sum(values) / sum(counts)` of each system, tested against the first.

    Args:
        systems: values, float [examples] each, for the same examples.
        counts: denominators, int or float [examples].
        highest: largest possible value.
    """
    return _compared(*_ratio(systems, counts, resamples, 0.0, highest))


def _ratio(systems: Sequence[np.ndarray], counts: np.ndarray, resamples: int, lowest: float, highest: float) -> Sampled:
    drawn = _draws(len(counts), resamples)
    sampled = np.array([[values[row].sum() / counts[row].sum() for values in systems] for row in drawn])
    scores = np.array([values.sum() / counts.sum() for values in systems])
    return Sampled(scores, sampled.T, lowest, highest, len(counts))


def _draws(size: int, resamples: int) -> Iterator[np.ndarray]:
    """Yields the examples of each resample, int [size], one in memory at a time; the same as sacreBLEU's."""
    rng = np.random.default_rng(SEED)
    for _ in range(resamples):
        yield rng.choice(size, size=size, replace=True)


def _compared(scores: np.ndarray, sampled: np.ndarray, lowest: float, highest: float, size: int) -> list[Estimate]:
    """Returns the estimate of each system from its score and its resamples' scores, tested against the first.

    Args:
        scores: float [systems].
        sampled: float [systems, resamples].
        size: number of examples.
    """
    result = []
    for number, (score, samples) in enumerate(zip(scores, sampled, strict=True)):
        mean, half = estimate_ci(samples)
        p_value = two_sided(samples - sampled[0], score - scores[0], size) if number else None
        result.append(Estimate(float(score), float(mean), float(half), p_value, lowest, highest))
    return result


def two_sided(differences: np.ndarray, observed: float, size: int) -> float:
    """Returns the p-value of an observed difference; 1 for a difference that is not a number.

    It is at least 2^(1 - size), the p-value of the exact sign test if all `size` examples differ in one direction: few
    examples have few different resamples.

    Args:
        differences: difference of each resample, float [resamples].
    """
    nearer = np.abs(differences - observed) < abs(observed) * (1 - ROUNDING)
    return max(float((~nearer).sum() + 1) / (len(differences) + 1), 2.0 ** (1 - size))
