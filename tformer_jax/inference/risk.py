"""Minimum Bayes risk decoding: the output with the highest expected similarity to all candidates.

"Minimum Bayes-Risk Decoding for Statistical Machine Translation", 2004; with samples of neural models, "Sampling-Based
Approximations to Minimum Bayes Risk Decoding for Neural Machine Translation", 2022.
"""

from collections.abc import Callable, Sequence

import numpy as np

ORDER, BETA = 6, 2
"""Maximum length of n-grams of chrF, and weight of recall; sacreBLEU's defaults."""


Utility = Callable[[Sequence[str]], np.ndarray]
"""Returns the similarity of each text to each text as the reference: float64 [N, N]."""


def rank_by_risk(texts: Sequence[str]) -> list[int]:
    """Returns the indices of the texts, the one with the highest mean chrF against all texts first.

    A text that occurs several times counts as often, and equal texts stay together, in order.
    """
    values = expected_utilities(texts, chrf_matrix)
    firsts = {text: place for place, text in reversed([*enumerate(texts)])}
    return sorted(range(len(texts)), key=lambda index: (-values[index], firsts[texts[index]]))


def expected_utilities(texts: Sequence[str], utility: Utility) -> np.ndarray:
    """Returns the mean similarity of each text to all texts, of which a repeated one counts as often: float64 [N]."""
    unique = list(dict.fromkeys(texts))
    places = {text: place for place, text in enumerate(unique)}
    order = [places[text] for text in texts]
    return (utility(unique) @ np.bincount(order, minlength=len(unique)) / max(len(texts), 1))[order]


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
