"""Confidence intervals as sacreBLEU computes them, and paired two-sided tests, by bootstrap resampling."""

import dataclasses
import math
import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import sacrebleu
from sacrebleu.significance import estimate_ci

from tformer_jax.config.task import Task
from tformer_jax.report.outputs import Outputs
from tformer_jax.tasks.evaluators.bleu import bleu_tokenizing

RESAMPLES = 1000
PERCENT = 100.0
TRANSLATION_METRICS = ("bleu", "chrf", "chrf++", "exact_match")
"""Metrics of translations that are resampled; TER would take minutes."""
SEED = 12345
"""sacreBLEU's seed."""
ROUNDING = 1e-9
"""Relative rounding error of differences that are equal."""


@dataclasses.dataclass(frozen=True)
class Estimate:
    """A metric of one system, with its 95 % interval: `mean - half` to `mean + half`, within 0 to `highest`."""

    score: float
    mean: float
    half: float
    p_value: float | None = None
    """Of the difference from the baseline, two-sided; None for the baseline."""
    highest: float = math.inf
    """Largest possible value."""

    @property
    def low(self) -> float:
        """The lower end of the interval."""
        return max(self.mean - self.half, 0.0)

    @property
    def high(self) -> float:
        """The upper end of the interval."""
        return min(self.mean + self.half, self.highest)


def estimates(systems: Sequence[Outputs], task: Task, resamples: int = RESAMPLES) -> dict[str, list[Estimate]]:
    """Returns the loss, and BLEU, chrF and exact match of translations, or the accuracy of labels, for each system.

    Translations in several directions have metrics of each direction, such as `chrf:en-de`, and their means.

    The first system is the baseline of the paired bootstrap test (Koehn, 2004). All systems share the resamples, and
    must have the same references. The loss needs losses of the same parts in all systems.

    The p-value is two-sided: the share of resamples whose difference is at least as far from the observed difference as
    that is from 0 (Efron and Tibshirani, 1993, chapter 16). sacreBLEU's rejects about twice as often, because it takes
    absolute differences before it centers them.
    """
    results: dict[str, list[Estimate]] = {}
    labels = systems[0].labels
    if len(labels) and all(np.array_equal(system.labels, labels) for system in systems):
        results["loss"] = ratio([system.nll for system in systems], labels, resamples)
    if task.references is None or not systems[0].texts:
        return results
    if task.references == "labels":
        return results | {"accuracy": share([system.hits for system in systems], resamples)}
    directions = dict.fromkeys(systems[0].directions)
    parts = {
        direction: _of_translations([system.of_direction(direction) for system in systems], direction, resamples)
        for direction in directions
    }
    shared = [name for name in TRANSLATION_METRICS if all(name in part for part in parts.values())]
    means = {name: _compared(*_mean([part[name] for part in parts.values()])) for name in shared}
    exact = {"exact_match": means.pop("exact_match")}
    results = means | results | exact
    for direction, part in parts.items():
        if direction is not None:
            results |= {f"{name}:{direction}": _compared(*found) for name, found in part.items()}
    return results


class Sampled(NamedTuple):
    """Scores of systems, and of their resamples."""

    scores: np.ndarray
    """float64 [systems]."""
    samples: np.ndarray
    """float64 [systems, resamples]."""
    highest: float = PERCENT
    """Largest possible value."""


def _of_translations(systems: Sequence[Outputs], direction: str | None, resamples: int) -> dict[str, Sampled]:
    """Returns the metrics of translations in one direction by name; BLEU and chrF++ if they have a signature."""
    signatures = systems[0].signatures
    metrics: dict[str, Any] = {"chrf": sacrebleu.CHRF()}
    if bleu := bleu_of(signatures, direction):
        metrics["bleu"] = bleu
    if "chrf++" in signatures:
        metrics["chrf++"] = sacrebleu.CHRF(word_order=2)
    found = {name: _by_sacrebleu(systems, metric, resamples) for name, metric in metrics.items()}
    hits = [PERCENT * system.hits for system in systems]
    return found | {"exact_match": _ratio(hits, np.ones(len(hits[0])), resamples, PERCENT)}


def _mean(parts: Sequence[Sampled]) -> Sampled:
    """Returns the mean over directions."""
    scores = np.mean([part.scores for part in parts], axis=0)
    return Sampled(scores, np.mean([part.samples for part in parts], axis=0))


def _by_sacrebleu(systems: Sequence[Outputs], metric: Any, resamples: int) -> Sampled:
    extracted = [metric._extract_corpus_statistics(system.texts, [systems[0].references]) for system in systems]
    scores = [metric._aggregate_and_compute(statistics).score for statistics in extracted]
    arrays = [np.array(statistics, np.float32) for statistics in extracted]

    def score_sample(statistics: np.ndarray) -> float:
        return metric._compute_score_from_stats(statistics.sum(0)).score

    drawn = _draws(len(systems[0].texts), resamples)
    sampled = np.array([[score_sample(array[row]) for array in arrays] for row in drawn])
    return Sampled(np.array(scores), sampled.T)


def bleu_of(signatures: dict[str, str], direction: str | None = None) -> sacrebleu.BLEU | None:
    """Returns BLEU with the tokenizer that a signature names; None without a signature or the tokenizer's package."""
    signature = signatures.get(f"bleu:{direction}") or signatures.get("bleu", "")
    tokenizer = re.search(r"tok:(ja-mecab|ko-mecab|[\w-]+)", signature)
    try:
        return bleu_tokenizing(tokenizer[1]) if tokenizer else None
    except (RuntimeError, ImportError, OSError):
        return None


def share(systems: Sequence[np.ndarray], resamples: int = RESAMPLES) -> list[Estimate]:
    """Returns the percentage of true values of each system; see `ratio`.

    Args:
        systems: bool [examples] each, for the same examples.
    """
    return ratio([PERCENT * hits for hits in systems], np.ones(len(systems[0])), resamples, PERCENT)


def ratio(
    systems: Sequence[np.ndarray], counts: np.ndarray, resamples: int = RESAMPLES, highest: float = math.inf
) -> list[Estimate]:
    """Returns `sum(values) / sum(counts)` of each system, tested against the first.

    Args:
        systems: values, float [examples] each, for the same examples.
        counts: denominators, int or float [examples].
        highest: largest possible value.
    """
    return _compared(*_ratio(systems, counts, resamples, highest))


def _ratio(systems: Sequence[np.ndarray], counts: np.ndarray, resamples: int, highest: float) -> Sampled:
    drawn = _draws(len(counts), resamples)
    sampled = np.array([[values[row].sum() / counts[row].sum() for values in systems] for row in drawn])
    return Sampled(np.array([values.sum() / counts.sum() for values in systems]), sampled.T, highest)


def _draws(size: int, resamples: int) -> Iterator[np.ndarray]:
    """Yields the examples of each resample, int [size], one in memory at a time; the same as sacreBLEU's."""
    rng = np.random.default_rng(SEED)
    for _ in range(resamples):
        yield rng.choice(size, size=size, replace=True)


def _compared(scores: np.ndarray, sampled: np.ndarray, highest: float) -> list[Estimate]:
    """Returns the estimate of each system from its score and its resamples' scores, tested against the first.

    Args:
        scores: float [systems].
        sampled: float [systems, resamples].
    """
    result = []
    for number, (score, samples) in enumerate(zip(scores, sampled, strict=True)):
        mean, half = estimate_ci(samples)
        p_value = two_sided(samples - sampled[0], score - scores[0]) if number else None
        result.append(Estimate(float(score), float(mean), float(half), p_value, highest))
    return result


def two_sided(differences: np.ndarray, observed: float) -> float:
    """Returns the p-value of an observed difference; 1 for a difference that is not a number.

    Args:
        differences: difference of each resample, float [resamples].
    """
    nearer = np.abs(differences - observed) < abs(observed) * (1 - ROUNDING)
    return float((~nearer).sum() + 1) / (len(differences) + 1)
