"""Rows in batches of few shapes, and the results back in their places."""

import numpy as np
import pytest

from tformer_jax.inference.batching import in_batches, pad_rows
from tformer_jax.special_tokens import PAD


def batches(lengths, *, size: int, max_length: int):
    """The shapes that `run` sees and the lengths of their rows; checks that every result finds its place."""
    seen = []

    def run(tokens, places):
        seen.append((tokens.shape, (tokens != PAD).sum(1).tolist()))
        return [(int(place), int(row.sum())) for place, row in zip(places, tokens, strict=True)]

    found = in_batches([[5] * n for n in lengths], run, size=size, max_length=max_length)
    assert found == [(place, 5 * n) for place, n in enumerate(lengths)]
    return seen


def test_rows_of_similar_length_share_a_batch():
    assert batches([9, 1, 33, 17, 40, 0, 2], size=2, max_length=40) == [
        ((2, 16), [0, 1]),
        ((2, 16), [2, 9]),
        ((2, 40), [17, 33]),
        ((2, 40), [40, 0]),
    ]


@pytest.mark.parametrize(("count", "rows"), [(1, 1), (2, 2), (3, 4), (33, 64), (64, 64), (65, 64), (200, 64)])
def test_all_batches_have_the_same_number_of_rows(count, rows):
    assert {shape for shape, _ in batches([3] * count, size=64, max_length=100)} == {(rows, 16)}


def test_many_lengths_have_few_shapes():
    shapes = [shape for shape, _ in batches(range(101), size=4, max_length=100 + 1)]
    assert sorted(set(shapes)) == [(4, 16), (4, 32), (4, 64), (4, 101)]


def test_nothing_to_do():
    assert batches([], size=4, max_length=9) == []


def test_padding_on_either_side():
    rows = [[7], [7, 8, 9], []]
    np.testing.assert_array_equal(pad_rows(rows, 4, 3), [[7, 0, 0], [7, 8, 9], [0, 0, 0], [0, 0, 0]])
    np.testing.assert_array_equal(pad_rows(rows, 3, 4, pad_left=True), [[0, 0, 0, 7], [0, 7, 8, 9], [0, 0, 0, 0]])
