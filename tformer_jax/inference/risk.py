"""Minimum Bayes risk decoding: the output with the highest expected similarity to all candidates.

"Minimum Bayes-Risk Decoding for Statistical Machine Translation", 2004; with samples of neural models, "Sampling-Based
Approximations to Minimum Bayes Risk Decoding for Neural Machine Translation", 2022.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from tformer_jax.base.errors import UserError
from tformer_jax.config import Config, EvalConfig, metrics
from tformer_jax.data.tokenizers import Tokenizers
from tformer_jax.inference.languages import Languages, own_direction
from tformer_jax.inference.requests import EncodedRequest

if TYPE_CHECKING:
    from tformer_jax.inference.engine import Request

ORDER, BETA = 6, 2
"""Maximum length of n-grams of chrF, and weight of recall; sacreBLEU's defaults."""


Similarity = Callable[[Sequence[str]], np.ndarray]
"""Returns the similarity of each text to each text as the reference: float64 [N, N]."""


@dataclasses.dataclass(frozen=True)
class Utility:
    """A metric of `kinds.METRICS`, the higher the better, as the similarity of the outputs of a text."""

    name: str = "chrf"
    language: str = "en"
    """Of the outputs."""
    evaluation: EvalConfig | None = None
    """Settings of the metric; None: the defaults."""
    languages: Languages | None = None
    """Those of a model of several languages."""

    @classmethod
    def of_run(cls, cfg: Config, tokenizers: Tokenizers) -> "Utility":
        """Returns `decode.utility`.

        Raises:
            UserError: the metric does not compare outputs with references, or lacks a package or file.
        """
        own = own_direction(cfg.data)
        languages = Languages(cfg.data, tokenizers) if cfg.data.multilingual else None
        utility = cls(cfg.decode.utility, own.target if own else "en", cfg.eval, languages)
        if cfg.decode.candidates > 1 and utility.name != "chrf":
            utility.scorer  # noqa: B018
        return utility

    @functools.cached_property
    def scorer(self) -> metrics.Metric:
        """The metric itself."""
        evaluation = self.evaluation or EvalConfig(metrics=(self.name,))
        scorer = metrics.build_metric(evaluation, self.name, self.language)
        if not scorer.applies:
            raise UserError(f"the metric {self.name} does not compare outputs with references: name another one")
        return scorer

    @property
    def sign(self) -> int:
        """-1 if lower values are better, else 1."""
        return -1 if metrics.lower_is_better(self.name) else 1

    def matrices(self, sources: Sequence[str], rows: Sequence[Sequence[str]]) -> list[np.ndarray]:
        """Returns the similarities of the outputs of each source, as `Similarity`."""
        if self.name == "chrf":
            return [chrf_matrix(texts) for texts in rows]
        pairs = zip(sources, rows, strict=True)
        triples = [(source, text, (other,)) for source, texts in pairs for text in texts for other in texts]
        scores = self.sign * (self.scorer.checked_scores(*zip(*triples, strict=True)) if triples else np.empty(0))
        parts = np.split(scores, np.cumsum([len(texts) ** 2 for texts in rows])[:-1])
        return [part.reshape(len(texts), len(texts)) for part, texts in zip(parts, rows, strict=True)]

    def rank(self, source: str, texts: Sequence[str]) -> list[int]:
        """Returns the indices of the outputs of a source, the one with the least risk first (`rank_by_risk`)."""
        return rank_by_risk(texts, lambda unique: self.matrices([source], [unique])[0])

    def rank_outputs(
        self, request: "Request | EncodedRequest", texts: Sequence[str], present: Sequence[bool]
    ) -> list[int]:
        """As `rank`, with the metric of the language into which a request is translated.

        Args:
            present: whether each output is one of the search or a sample; others are no candidates, and come last.
        """
        places = [place for place, is_present in enumerate(present) if is_present]
        metric = self
        if self.languages is not None and self.name != "chrf":
            metric = _in_language(self.name, self.languages.of_output(request.ids, request.tags), self.evaluation)
        order = [places[rank] for rank in metric.rank(request.text, [texts[place] for place in places])]
        return order + [place for place, is_present in enumerate(present) if not is_present]


@functools.cache
def _in_language(name: str, language: str, evaluation: EvalConfig | None) -> Utility:
    return Utility(name, language, evaluation)


def rank_by_risk(texts: Sequence[str], similarity: Similarity) -> list[int]:
    """Returns the indices of the texts, in descending order of their mean similarity to all texts.

    A repeated text counts repeatedly; equal texts stay together, in order.
    """
    values = expected_utilities(texts, similarity)
    firsts = {text: place for place, text in reversed([*enumerate(texts)])}
    return sorted(range(len(texts)), key=lambda index: (-values[index], firsts[texts[index]]))


def expected_utilities(texts: Sequence[str], similarity: Similarity) -> np.ndarray:
    """Returns the mean similarity of each text to all texts, counting repeated texts repeatedly: float64 [N]."""
    unique = list(dict.fromkeys(texts))
    places = {text: place for place, text in enumerate(unique)}
    order = [places[text] for text in texts]
    return (similarity(unique) @ np.bincount(order, minlength=len(unique)) / max(len(texts), 1))[order]


def chrf_matrix(texts: Sequence[str]) -> np.ndarray:
    """Returns sacreBLEU's sentence chrF of each text against each text as the reference: float64 [N, N]."""
    characters = ["".join(text.split()) for text in texts]
    shape = len(texts), len(texts)
    precision, recall, orders = np.zeros(shape), np.zeros(shape), np.zeros(shape)
    for n in range(1, ORDER + 1):
        counts = _count_ngrams(characters, n)
        matches = np.array([np.minimum(counts, row).sum(axis=1) for row in counts]).reshape(shape).T
        totals = counts.sum(axis=1)
        present = (totals[:, None] > 0) & (totals > 0)
        precision += np.where(present, matches / np.maximum(totals, 1)[:, None], 0)
        recall += np.where(present, matches / np.maximum(totals, 1), 0)
        orders += present
    precision, recall = precision / np.maximum(orders, 1), recall / np.maximum(orders, 1)
    return 100 * (1 + BETA**2) * precision * recall / np.maximum(BETA**2 * precision + recall, np.finfo(float).tiny)


def _count_ngrams(texts: Sequence[str], n: int) -> np.ndarray:
    """Returns how often each text has each n-gram of any of them: int64 [N, n-grams]."""
    ngrams = [[text[start : start + n] for start in range(len(text) - n + 1)] for text in texts]
    columns = {ngram: column for column, ngram in enumerate(dict.fromkeys(part for row in ngrams for part in row))}
    counts = np.zeros((len(texts), len(columns)), np.int64)
    for row, parts in enumerate(ngrams):
        np.add.at(counts[row], [columns[part] for part in parts], 1)
    return counts
