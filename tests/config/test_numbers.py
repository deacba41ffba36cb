"""Numbers with few significant digits, for JSON."""

import math

from tformer_jax.base.numbers import significant


def test_significant_digits():
    assert significant([1 / 3, 1234.5678, None, math.nan, -math.inf], 4) == [0.3333, 1235, None, None, None]
    assert significant([[0.0123456], []], 2) == [[0.012], []]


def test_whole_numbers_are_exact():
    actual = significant([123_456_789, 1_234_567.0, 2.0, float(2**60)], 3)
    assert actual == [123_456_789, 1_234_567, 2, 1.15e18]
    assert [type(number) for number in actual] == [int, int, int, float]
