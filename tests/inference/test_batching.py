"""Rows run in batches of few shapes; results are returned in the order of the rows."""

import itertools

import numpy as np
import pytest

from tformer_jax.base.errors import UserError
from tformer_jax.inference.batching import longest_first, pad_rows, powers_of_two, run_in_batches, run_in_chunks
from tformer_jax.special_tokens import PAD


def batches(lengths, *, size: int, max_length: int):
    """Returns the shapes that `run` receives and the lengths of their rows; asserts the order of the results."""
    rows, seen = [[5] * n for n in lengths], []

    def run(indices, T):
        tokens = pad_rows([rows[index] for index in indices], len(indices), T)
        seen.append((tokens.shape, (tokens != PAD).sum(1).tolist()))
        return [(int(index), int(row[row != PAD].sum())) for index, row in zip(indices, tokens, strict=True)]

    actual = list(run_in_batches(list(map(len, rows)), run, size=size, max_length=max_length))
    assert actual == [(index, 5 * n) for index, n in enumerate(lengths)]
    return seen


def test_rows_of_similar_length_share_a_batch():
    assert batches([9, 1, 33, 17, 40, 0, 2], size=2, max_length=40) == [
        ((2, 16), [0, 1]),
        ((2, 16), [2, 9]),
        ((2, 40), [17, 33]),
        ((2, 40), [40, 40]),
    ]


@pytest.mark.parametrize(("count", "rows"), [(1, 1), (2, 2), (3, 4), (33, 64), (64, 64), (65, 64), (200, 64)])
def test_all_batches_have_the_same_number_of_rows(count, rows):
    assert {shape for shape, _ in batches([3] * count, size=64, max_length=100)} == {(rows, 16)}


def test_many_lengths_have_few_shapes():
    shapes = [shape for shape, _ in batches(range(101), size=4, max_length=100 + 1)]
    assert sorted(set(shapes)) == [(4, 16), (4, 32), (4, 64), (4, 101)]


def test_results_are_yielded_before_later_batches_run():
    ran = []

    def run(indices, _):
        ran.append(indices.tolist())
        return indices

    actual = run_in_batches([1, 20, 1, 9], run, size=2, max_length=32)
    assert next(actual) == 0
    assert ran == [[0, 2]]
    assert list(actual) == [1, 2, 3]
    assert ran == [[0, 2], [3, 1]]


@pytest.mark.parametrize(("last", "expected"), [(64, [16, 32, 64]), (65, [16, 32, 64, 65]), (16, [16]), (9, [9])])
def test_lengths_of_batches(last, expected):
    assert powers_of_two(12, last) == expected


def test_longer_rows_of_a_window_come_first_and_empty_ones_are_left_out():
    assert longest_first([9, 2, 0, 3, 2, 7, 8], 4) == [0, 3, 1, 6, 5, 4]


def test_no_rows():
    assert batches([], size=4, max_length=9) == []


def test_padding_on_either_side():
    rows = [[7], [7, 8, 9], []]
    np.testing.assert_array_equal(pad_rows(rows, 4, 3), [[7, PAD, PAD], [7, 8, 9], [PAD] * 3, [PAD] * 3])
    np.testing.assert_array_equal(pad_rows(rows, 3, 4, pad_left=True), [[PAD, PAD, PAD, 7], [PAD, 7, 8, 9], [PAD] * 4])


def squares(items, *, size=3, skip=0):
    """Returns the squares, and the chunks they were computed in."""
    chunks = []

    def run(rows):
        chunks.append(rows)
        return [row**2 for row in rows]

    return run_in_chunks(items, lambda index, item: item, run, skip=skip, size=size), chunks


@pytest.mark.parametrize("count", [0, 1, 3, 7])
def test_chunks_yield_all_results_in_order(count):
    actual, chunks = squares(range(count))
    assert list(actual) == [n**2 for n in range(count)]
    assert chunks == [list(range(count))[start : start + 3] for start in range(0, count, 3)]


def test_results_are_yielded_before_their_chunk_is_complete():
    made = []

    def run(rows):
        for row in rows:
            made.append(row)
            yield row

    actual = run_in_chunks(range(6), lambda _, item: item, run, size=3)
    for n in range(6):
        assert (next(actual), made) == (n, [*range(n + 1)])


def test_at_most_one_chunk_is_read():
    items = itertools.count()
    actual, _ = squares(items)
    assert list(itertools.islice(actual, 4)) == [0, 1, 4, 9]
    assert next(items) == 6


@pytest.mark.parametrize("skip", range(8))
def test_skipping_does_not_change_chunks(skip):
    actual, chunks = squares(range(7), skip=skip)
    assert list(actual) == [n**2 for n in range(skip, 7)]
    assert chunks == [list(range(7))[start : start + 3] for start in range(skip // 3 * 3, 7, 3)]


def test_earlier_results_are_yielded_before_an_error():
    def items():
        yield from range(5)
        raise UserError("the sixth")

    actual, _ = squares(items())
    assert list(itertools.islice(actual, 5)) == [0, 1, 4, 9, 16]
    with pytest.raises(UserError, match="the sixth"):
        next(actual)
