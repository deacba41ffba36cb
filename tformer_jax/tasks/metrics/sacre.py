"""Metrics that sacreBLEU computes."""

import copy
import functools
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import sacrebleu

from tformer_jax.config.metrics import Metric, References


class SacreMetric(Metric):
    """A metric of sacreBLEU; a subclass returns its object from `build_scorer`."""

    bounds = (0.0, 100.0)
    by_language, stored = True, False

    def __init__(self, *args: Any):
        super().__init__(*args)
        self.scorer = self.build_scorer()

    def build_scorer(self) -> Any:
        """Returns the object of sacreBLEU."""
        raise NotImplementedError

    def statistics(self, sources: Sequence[str], outputs: Sequence[str], references: References) -> np.ndarray:
        sets = list(itertools.zip_longest(*references))
        return np.array(self.scorer._extract_corpus_statistics(outputs, sets), np.float64)

    def score(self, sums: np.ndarray) -> float:
        return float(self.scorer._compute_score_from_stats(sums.tolist()).score)

    def score_alone(self, row: np.ndarray) -> float:
        """As `Metric.score_alone`; BLEU counts only n-grams of lengths that the output has."""
        alone = copy.copy(self.scorer)
        alone.effective_order = True
        return float(alone._compute_score_from_stats(row.tolist()).score)

    def signature_of(self, references: References) -> str:
        """Returns sacreBLEU's signature, which names the number of references."""
        counts = {len(each) for each in references}
        self.scorer.num_refs = counts.pop() if len(counts) == 1 else -1
        return str(self.scorer.get_signature())


class Chrf(SacreMetric):
    """chrF ("chrF: character n-gram F-score for automatic MT evaluation", 2015)."""

    build_scorer = staticmethod(sacrebleu.CHRF)


class ChrfPlusPlus(SacreMetric):
    """chrF++, which also counts words and pairs of them ("chrF++: words helping character n-grams", 2017)."""

    build_scorer = staticmethod(functools.partial(sacrebleu.CHRF, word_order=2))


class Ter(SacreMetric):
    """Translation edit rate ("A Study of Translation Edit Rate with Targeted Human Annotation", 2006)."""

    lower_is_better = True
    bounds = (0.0, float("inf"))
    build_scorer = staticmethod(sacrebleu.TER)
