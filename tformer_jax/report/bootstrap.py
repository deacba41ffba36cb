"""Confidence intervals and paired tests by bootstrap resampling, as sacreBLEU computes them."""

import dataclasses
import math
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import sacrebleu
from sacrebleu.significance import PairedTest, estimate_ci

from tformer_jax.report.outputs import Outputs

RESAMPLES = 1000
PERCENT = 100.0
SEED = 12345
"""sacreBLEU's seed."""


@dataclasses.dataclass(frozen=True)
class Estimate:
    """A metric of one system, with its 95 % interval: `mean - half` to `mean + half`, at most 0 to `highest`."""

    score: float
    mean: float
    half: float
    p_value: float | None = None
    """Of the difference from the baseline, two-sided; None for the baseline."""
    highest: float = math.inf
    """Largest possible value."""

    @property
    def low(self) -> float:
        """Returns the lower end of the interval."""
        return max(self.mean - self.half, 0.0)

    @property
    def high(self) -> float:
        """Returns the upper end of the interval."""
        return min(self.mean + self.half, self.highest)


def estimates(systems: Sequence[Outputs], family: str, resamples: int = RESAMPLES) -> dict[str, list[Estimate]]:
    """Returns the loss, and BLEU, chrF and exact match of translations, or the accuracy of labels, for each system.

    The first system is the baseline of the paired bootstrap test (Koehn, 2004). All systems share the resamples, and
    must have the same references. The loss needs losses of the same parts in all systems.
    """
    found: dict[str, list[Estimate]] = {}
    labels = systems[0].labels
    if len(labels) and all(np.array_equal(system.labels, labels) for system in systems):
        found["loss"] = ratio([system.nll for system in systems], labels, resamples)
    if family == "decoder_lm" or not systems[0].texts:
        return found
    name = "accuracy" if family == "classifier" else "exact_match"
    found[name] = share([system.hits for system in systems], resamples)
    if family == "classifier":
        return found
    metrics: dict[str, Any] = {"chrf": sacrebleu.CHRF()}
    if bleu := bleu_of(systems[0].signatures):
        metrics = {"bleu": bleu, **metrics}
    return {name: _by_sacrebleu(systems, name, metric, resamples) for name, metric in metrics.items()} | found


def _by_sacrebleu(systems: Sequence[Outputs], name: str, metric: Any, resamples: int) -> list[Estimate]:
    named: list[Any] = [(str(number), system.texts) for number, system in enumerate(systems)]
    test = PairedTest(named, {name: metric}, [systems[0].references], test_type="bs", n_samples=resamples)
    _, scores = test()
    (results,) = (found for label, found in scores.items() if label != "System")
    return [Estimate(one.score, one.mean, one.ci, one.p_value, PERCENT) for one in results]  # type: ignore[union-attr, arg-type]


def bleu_of(signatures: dict[str, str]) -> sacrebleu.BLEU | None:
    """Returns BLEU with the tokenizer that a signature names; None without a signature or the tokenizer's package."""
    tokenizer = re.search(r"tok:([\w-]+)", signatures.get("bleu", ""))
    try:
        return sacrebleu.BLEU(tokenize=tokenizer[1]) if tokenizer else None
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
    """Returns `sum(values) / sum(counts)` of each system, tested against the first as sacreBLEU tests BLEU.

    Args:
        systems: values, float [examples] each, for the same examples.
        counts: number [examples].
        highest: largest possible value.
    """
    size = len(counts)
    drawn = np.random.default_rng(SEED).choice(size, size=(resamples, size), replace=True)
    total, totals = counts.sum(), counts[drawn].sum(1)
    scores = [values[drawn].sum(1) / totals for values in systems]
    result = []
    for number, (values, sampled) in enumerate(zip(systems, scores, strict=True)):
        score, p_value = values.sum() / total, None
        if number:
            differences = np.abs(sampled - scores[0])
            above = (differences - differences.mean() > abs(score - systems[0].sum() / total)).sum()
            p_value = float(above + 1) / (resamples + 1)
        mean, half = estimate_ci(sampled)
        result.append(Estimate(float(score), float(mean), float(half), p_value, highest))
    return result
