"""Reranking: exact line search against all intervals of all pairs of candidates, and weights that are never worse."""

import itertools

import numpy as np
import pytest
import sacrebleu

from tformer_jax.inference.reranking import NBest, choose, evaluate, search_line, tune

WORDS = ["the", "a", "cat", "dog", "sat", "ran", "on", "mat"]


def random_lists(seed, texts=4, candidates=5, features=3):
    """Returns n-best lists of random sentences with statistics of BLEU, and the outputs and references."""
    rng = np.random.default_rng(seed)
    metric = sacrebleu.BLEU(effective_order=True)
    references = [" ".join(rng.choice(WORDS, 6)) for _ in range(texts)]
    outputs = [
        [" ".join(rng.choice(WORDS, rng.integers(1, 8))) if rng.random() < 0.7 else each for _ in range(candidates)]
        for each in references
    ]
    lists = []
    for row, reference in zip(outputs, references, strict=True):
        actual = metric._extract_corpus_statistics(row, [[reference] * len(row)])
        values = rng.integers(-3, 4, (candidates, features)) / 2  # with parallel and equal lines
        lists.append(NBest(values, np.array(actual, float)))

    def score(sums):
        return metric._aggregate_and_compute([sums.tolist()]).score

    return lists, score, outputs, references


def all_intervals(lists, weights, direction):
    """Returns a number in each interval between the places where any two candidates of a text are equal."""
    places = set()
    for each in lists:
        values, slopes = each.features @ weights, each.features @ direction
        for a, b in itertools.combinations(range(len(values)), 2):
            if slopes[a] != slopes[b]:
                places.add((values[a] - values[b]) / (slopes[b] - slopes[a]))
    places = sorted(places)
    return [places[0] - 1, *((a + b) / 2 for a, b in itertools.pairwise(places)), places[-1] + 1]


@pytest.mark.parametrize("seed", range(6))
def test_the_best_place_of_a_line_is_the_best_of_all_intervals(seed):
    lists, score, outputs, references = random_lists(seed)
    rng = np.random.default_rng(seed)
    weights, direction = rng.integers(-2, 3, 3) + 0.25, np.eye(3)[seed % 3]
    best = 0.0
    for place in all_intervals(lists, weights, direction):
        at = weights + place * direction
        chosen = [row[choose(each.features, at)] for row, each in zip(outputs, lists, strict=True)]
        best = max(best, sacrebleu.BLEU(effective_order=True).corpus_score(chosen, [references]).score)
    assert search_line(lists, score, weights, direction).score == pytest.approx(best)


def test_tuned_weights_are_never_worse_than_each_feature_alone():
    gains = []
    for seed in range(8):
        lists, score, outputs, references = random_lists(seed, texts=6)
        tuned = tune(lists, score)
        alone = [evaluate(lists, score, unit).score for unit in np.eye(3)]
        chosen = [row[choose(each.features, tuned.weights)] for row, each in zip(outputs, lists, strict=True)]
        actual = sacrebleu.BLEU(effective_order=True).corpus_score(chosen, [references]).score
        assert tuned.score == pytest.approx(actual)
        assert np.abs(tuned.weights).max() == 1
        gains.append(tuned.score - max(alone))
    assert min(gains) >= 0
    assert max(gains) > 1


def test_tuning_is_deterministic_and_of_equal_candidates_the_first_is_chosen():
    lists, score, _, _ = random_lists(3)
    assert np.array_equal(tune(lists, score).weights, tune(lists, score).weights)
    assert choose(np.array([[0.0, 1.0], [1.0, 0.0], [1.0, 0.0]]), np.array([1.0, 0.0])) == 1
    single = [NBest(np.ones((1, 2)), np.array([[2.0]]))]
    assert tune(single, np.sum).score == 2
