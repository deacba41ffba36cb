"""Choice among candidate outputs by a weighted sum of features, and weights for which a corpus metric is high.

"Minimum Error Rate Training in Statistical Machine Translation", 2003: along a line in the space of weights, the chosen
candidates change at few points, so that the metric is computed for all intervals between them.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

SMALLEST_GAIN = 1e-9
"""Gains of a metric up to this are rounding errors."""


class NBest(NamedTuple):
    """The candidates of a text, best first for a model that ranks them."""

    features: np.ndarray
    """float64 [N, F]."""
    statistics: np.ndarray
    """float64 [N, S]: statistics of a metric of texts, whose sums over a corpus determine its score."""


CorpusScore = Callable[[np.ndarray], float]
"""Returns the score of a corpus, the higher the better, given the sums of its statistics, float64 [S]."""


class Weights(NamedTuple):
    """Weights of features, and the score of the candidates that they choose."""

    weights: np.ndarray
    """float64 [F]."""
    score: float


def choose(features: np.ndarray, weights: np.ndarray) -> int:
    """Returns the index of the first candidate with the largest weighted sum of features."""
    return int(np.argmax(features @ weights))


def evaluate(lists: Sequence[NBest], score: CorpusScore, weights: np.ndarray) -> Weights:
    """Returns the weights with the score of the candidates that they choose."""
    return Weights(weights, score(sum(each.statistics[choose(each.features, weights)] for each in lists)))


def tune(lists: Sequence[NBest], score: CorpusScore) -> Weights:
    """Returns weights that score at least as well as each feature alone; the largest weight is 1 or -1.

    Starts from each feature alone with weight 1, in order. Weights are changed one at a time to the best value
    (`search_line`), until no change is a gain. The search is deterministic; its result is a local optimum.
    """
    units = np.eye(lists[0].features.shape[1])
    best = max((_climb(lists, score, unit) for unit in units), key=lambda weights: weights.score)
    return best._replace(weights=best.weights / np.abs(best.weights).max())


def _climb(lists: Sequence[NBest], score: CorpusScore, start: np.ndarray) -> Weights:
    directions = np.eye(len(start))
    best, previous = evaluate(lists, score, start), -np.inf
    while best.score > previous + SMALLEST_GAIN:
        previous = best.score
        for direction in directions:
            candidate = search_line(lists, score, best.weights, direction)
            if candidate.weights.any() and candidate.score > best.score + SMALLEST_GAIN:
                best = candidate
    return best


def search_line(lists: Sequence[NBest], score: CorpusScore, weights: np.ndarray, direction: np.ndarray) -> Weights:
    """Returns the weights with the highest score on the line `weights + x * direction`, for any number x.

    The score is constant between neighboring places where the choice changes; x is in the middle of an interval.
    """
    changes = [_choices(each.features @ weights, each.features @ direction) for each in lists]
    starts = [each.statistics[chosen[0]] for each, (_, chosen) in zip(lists, changes, strict=True)]
    steps = [np.diff(each.statistics[chosen], axis=0) for each, (_, chosen) in zip(lists, changes, strict=True)]
    places, inverse = np.unique(np.concatenate([at for at, _ in changes]), return_inverse=True)
    differences = np.zeros((len(places) + 1, len(starts[0])))
    differences[0] = sum(starts)
    np.add.at(differences, inverse + 1, np.concatenate(steps))
    scores = [score(sums) for sums in np.cumsum(differences, axis=0)]
    place = _middles(places)[int(np.argmax(scores))]
    return evaluate(lists, score, weights + place * direction)


def _choices(values: np.ndarray, slopes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the upper envelope of lines: the places where the highest line changes [K], and those lines [K + 1]."""
    order = np.lexsort((-values, slopes))
    highest = order[np.append(True, np.diff(slopes[order]) > 0)]  # of parallel lines
    chosen: list[int] = []
    places: list[float] = []
    for line in highest.tolist():
        while chosen:
            place = (values[chosen[-1]] - values[line]) / (slopes[line] - slopes[chosen[-1]])
            if not places or place > places[-1]:
                places.append(place)
                break
            chosen.pop()
            places.pop()
        chosen.append(line)
    return np.array(places), np.array(chosen)


def _middles(places: np.ndarray) -> np.ndarray:
    """Returns a number in each interval between sorted places, and one beyond each end."""
    if not len(places):
        return np.zeros(1)
    return np.concatenate([[places[0] - 1], (places[:-1] + places[1:]) / 2, [places[-1] + 1]])
