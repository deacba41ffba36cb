"""Confidence intervals and paired tests by bootstrap resampling, as sacreBLEU computes them."""

import dataclasses
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import sacrebleu
from sacrebleu.significance import PairedTest, estimate_ci

from tformer_jax.report.outputs import Outputs

RESAMPLES = 1000
SEED = 12345
"""sacreBLEU's seed."""


@dataclasses.dataclass(frozen=True)
class Estimate:
    """A metric of one system, in percent, with its 95 % interval `mean - half`, `mean + half`."""

    score: float
    mean: float
    half: float
    p_value: float | None = None
    """Of the difference from the baseline, two-sided; None for the baseline."""

    @property
    def low(self) -> float:
        """Returns the lower end of the interval."""
        return self.mean - self.half

    @property
    def high(self) -> float:
        """Returns the upper end of the interval."""
        return self.mean + self.half


def estimates(systems: Sequence[Outputs], family: str, resamples: int = RESAMPLES) -> dict[str, list[Estimate]]:
    """Returns BLEU, chrF and exact match of translations, or the accuracy of labels, for each system.

    The first system is the baseline of the paired bootstrap test (Koehn, 2004). All metrics and systems share the
    resamples. All systems must have the same references.
    """
    if family == "decoder_lm" or not systems[0].texts:
        return {}
    name = "accuracy" if family == "classifier" else "exact_match"
    found = {name: share([system.hits for system in systems], resamples)}
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
    return [Estimate(one.score, one.mean, one.ci, one.p_value) for one in results]  # type: ignore[union-attr, arg-type]


def bleu_of(signatures: dict[str, str]) -> sacrebleu.BLEU | None:
    """Returns BLEU with the tokenizer that a signature names; None without a signature or the tokenizer's package."""
    tokenizer = re.search(r"tok:([\w-]+)", signatures.get("bleu", ""))
    try:
        return sacrebleu.BLEU(tokenize=tokenizer[1]) if tokenizer else None
    except (RuntimeError, ImportError, OSError):
        return None


def share(systems: Sequence[np.ndarray], resamples: int = RESAMPLES) -> list[Estimate]:
    """Returns the percentage of true values of each system, tested against the first as sacreBLEU tests BLEU.

    Args:
        systems: bool [examples] each, for the same examples.
    """
    size = len(systems[0])
    drawn = np.random.default_rng(SEED).choice(size, size=(resamples, size), replace=True)
    scores = [100 * hits[drawn].mean(1) for hits in systems]
    result = []
    for number, (hits, sampled) in enumerate(zip(systems, scores, strict=True)):
        p_value = None
        if number:
            differences = np.abs(sampled - scores[0])
            real = abs(100 * hits.mean() - 100 * systems[0].mean())
            above = (differences - differences.mean() > real).sum()
            p_value = float(above + 1) / (resamples + 1)
        mean, half = estimate_ci(sampled)
        result.append(Estimate(float(100 * hits.mean()), float(mean), float(half), p_value))
    return result
