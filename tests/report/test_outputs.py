"""The choice of outputs, and the marks on their differences."""

import functools
import re
import time

import numpy as np
import pytest
import sacrebleu

from tformer_jax.report.outputs import Outputs, choose_outputs, histogram, mark_differences
from tformer_jax.tasks.classification import CLASSIFICATION
from tformer_jax.tasks.language_model import LANGUAGE_MODEL
from tformer_jax.tasks.translation import TRANSLATION


def outputs(pairs, scores=None) -> Outputs:
    references, texts = map(list, zip(*pairs, strict=True))
    scores = scores or [None] * len(pairs)
    return Outputs(1, {}, ["s"] * len(pairs), references, texts, scores, np.zeros(0), np.zeros(0), [None] * len(pairs))


PAIRS = [
    ("a b c d", "a b c d"),
    ("one two three", "x"),
    ("red house", "red horse"),
    ("the longest text of all", "the longest text of all"),
]


def test_worst_best_and_random():
    actual = choose_outputs(outputs(PAIRS), TRANSLATION, shown=2)
    assert actual["worst"] == [1, 2]
    assert actual["best"] == [3, 0]
    assert actual == choose_outputs(outputs(PAIRS), TRANSLATION, shown=2)
    assert len(set(actual["random"])) == 2


def test_translations_are_ordered_by_sentence_chrf():
    expected = [sacrebleu.sentence_chrf(text, [reference]).score for reference, text in PAIRS]
    np.testing.assert_allclose(outputs(PAIRS).quality(TRANSLATION), expected)


def test_labels_are_ordered_from_sure_mistakes_to_sure_hits():
    actual = outputs([("a", "a"), ("a", "b"), ("a", "b"), ("b", "b")], [0.6, 0.9, 0.7, 0.8])
    assert choose_outputs(actual, CLASSIFICATION, shown=4)["worst"] == [1, 2, 0, 3]
    assert choose_outputs(actual, CLASSIFICATION, shown=4)["best"] == [3, 0, 2, 1]


def test_continuations_have_no_best():
    assert choose_outputs(outputs(PAIRS), LANGUAGE_MODEL, shown=3).keys() == {"samples"}


@pytest.mark.parametrize(
    ("reference", "output", "missing", "extra"),
    [
        ("a red house", "a blue house", ["red"], ["blue"]),
        ("a house", "a big house", [], ["big "]),
        ("in 2 Wochen.", "in 2 Wochen", ["."], []),
        ("我爱你", "我想你", ["爱"], ["想"]),
        ("a b", "", ["a b"], []),
        ("", "b", [], ["b"]),
    ],
)
def test_differences_are_marked(reference, output, missing, extra):
    old, new = mark_differences(reference, output)
    assert ("".join(text for _, text in old), "".join(text for _, text in new)) == (reference, output)
    assert [text for differs, text in old if differs] == missing
    assert [text for differs, text in new if differs] == extra


def test_what_is_not_marked_is_the_longest_common_subsequence_of_words():
    rng = np.random.default_rng(0)
    for _ in range(20):
        reference, output = (" ".join(rng.choice(["a", "bb", "ccc"], size)) for size in (5, 4))
        sides = [[text for differs, text in side if not differs] for side in mark_differences(reference, output)]
        assert "".join(sides[0]) == "".join(sides[1])
        assert len("".join(sides[0])) == longest(*(tuple(re.findall(r"\w+|\s+", text)) for text in (reference, output)))


@functools.cache
def longest(a: tuple[str, ...], b: tuple[str, ...]) -> int:
    """Returns the number of characters of the longest common subsequence, by its recursion."""
    if not a or not b:
        return 0
    shared = [len(a[0]) + longest(a[1:], b[1:])] if a[0] == b[0] else []
    return max(longest(a[1:], b), longest(a, b[1:]), *shared)


@pytest.mark.parametrize("joint", ["", " "])
def test_long_repetitive_texts_are_marked_soon(joint):
    """`difflib.SequenceMatcher` takes half a minute for them."""
    rng = np.random.default_rng(0)
    reference, output = (joint.join(rng.choice(["a", "b"], 1000)) for _ in range(2))
    start = time.process_time()
    old, _ = mark_differences(reference, output)
    assert time.process_time() - start < 2
    assert len("".join(text for differs, text in old if not differs)) > 700


def test_histograms_share_their_bins():
    edges, shares = histogram([np.array([0.0, 1.0, 1.0, 4.0]), np.array([2.0, np.nan])], bins=4)
    assert edges.tolist() == [0, 1, 2, 3, 4]
    assert [share.tolist() for share in shares] == [[25, 50, 0, 25], [0, 0, 100, 0]]
