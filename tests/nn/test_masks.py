"""Masks against matrices written by hand."""

import jax.numpy as jnp
import numpy as np
import pytest

from tformer_jax.nn import masks


def rows(*lines: str) -> np.ndarray:
    """`x` may attend, `.` is hidden."""
    return np.array([[character == "x" for character in line] for line in lines])


def test_causal_keeps_the_lower_triangle_with_its_diagonal():
    expected = rows("x...", "xx..", "xxx.", "xxxx")
    np.testing.assert_array_equal(masks.causal(4)[0, 0], expected)


def test_padding_hides_keys_in_every_row():
    real = jnp.array([[True, True, False], [True, False, False]])
    mask = masks.padding(real)
    assert mask.shape == (2, 1, 1, 3)
    np.testing.assert_array_equal(mask[:, 0, 0], real)


def test_combined():
    mask = masks.combine(masks.causal(3), masks.padding(jnp.array([[True, False, True]])), None)
    np.testing.assert_array_equal(mask[0, 0], rows("x..", "x..", "x.x"))
    assert masks.combine(None, None) is None


@pytest.mark.parametrize(
    ("hidden", "expected"),
    [
        (0, ("xxxx", "xxxx", "xxxx", "xxxx")),
        (1, ("xxx.", "xxxx", "xxxx", "xxxx")),
        (2, ("xx..", "xxx.", "xxxx", "xxxx")),
        (3, ("x...", "xx..", "xxx.", "xxxx")),
        (4, ("....", "x...", "xx..", "xxx.")),
    ],
)
def test_hidden_suffix(hidden, expected):
    np.testing.assert_array_equal(masks.hidden_suffix(4, hidden)[0, 0], rows(*expected))


def test_hidden_suffix_of_length_minus_one_is_causal():
    np.testing.assert_array_equal(masks.hidden_suffix(7, 6), masks.causal(7))


def test_cached_sees_valid_slots_up_to_its_own():
    valid = jnp.array([[False, True, True, True, False], [True, True, True, True, True]])
    mask = masks.cached(valid, jnp.int32(2), 2)
    np.testing.assert_array_equal(mask[0, 0], rows(".xx..", ".xxx."))
    np.testing.assert_array_equal(mask[1, 0], rows("xxx..", "xxxx."))
