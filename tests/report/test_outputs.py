"""The choice of outputs, and the marks on their differences."""

import numpy as np
import pytest
import sacrebleu

from tformer_jax.report.outputs import Outputs, choose, histogram, marked


def outputs(pairs, scores=None) -> Outputs:
    references, texts = map(list, zip(*pairs, strict=True))
    scores = scores or [None] * len(pairs)
    return Outputs(1, {}, ["s"] * len(pairs), references, texts, scores, np.zeros(0), np.zeros(0))


PAIRS = [
    ("a b c d", "a b c d"),
    ("one two three", "x"),
    ("red house", "red horse"),
    ("the longest text of all", "the longest text of all"),
]


def test_worst_best_and_random():
    found = choose(outputs(PAIRS), "seq2seq", shown=2)
    assert found["worst"] == [1, 2]
    assert found["best"] == [3, 0]
    assert found == choose(outputs(PAIRS), "seq2seq", shown=2)
    assert len(set(found["random"])) == 2


def test_translations_are_ordered_by_sentence_chrf():
    expected = [sacrebleu.sentence_chrf(text, [reference]).score for reference, text in PAIRS]
    np.testing.assert_allclose(outputs(PAIRS).quality("seq2seq"), expected)


def test_labels_are_ordered_from_sure_mistakes_to_sure_hits():
    found = outputs([("a", "a"), ("a", "b"), ("a", "b"), ("b", "b")], [0.6, 0.9, 0.7, 0.8])
    assert choose(found, "classifier", shown=4)["worst"] == [1, 2, 0, 3]
    assert choose(found, "classifier", shown=4)["best"] == [3, 0, 2, 1]


def test_continuations_have_no_best():
    assert choose(outputs(PAIRS), "decoder_lm", shown=3).keys() == {"samples"}


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
    old, new = marked(reference, output)
    assert ("".join(text for _, text in old), "".join(text for _, text in new)) == (reference, output)
    assert [text for differs, text in old if differs] == missing
    assert [text for differs, text in new if differs] == extra


def test_histograms_share_their_bins():
    edges, shares = histogram([np.array([0.0, 1.0, 1.0, 4.0]), np.array([2.0, np.nan])], bins=4)
    assert edges.tolist() == [0, 1, 2, 3, 4]
    assert [share.tolist() for share in shares] == [[25, 50, 0, 25], [0, 0, 100, 0]]
