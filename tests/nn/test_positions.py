"""Position vectors: a worked example, the rotation property, and positions beyond the trained length."""

import jax.numpy as jnp
import numpy as np
import pytest

from tests import position_oracles
from tests.helpers import assert_close, init_module, tiny
from tformer_jax.base.errors import UserError
from tformer_jax.nn import positions


def test_worked_example():
    # D = 4: columns sin(p), cos(p), sin(p / 100), cos(p / 100), to four places
    expected = [
        [0.0, 1.0, 0.0, 1.0],
        [0.8415, 0.5403, 0.0100, 0.9999],
        [0.9093, -0.4161, 0.0200, 0.9998],
        [0.1411, -0.9900, 0.0300, 0.9996],
    ]
    np.testing.assert_allclose(positions.sinusoidal(jnp.arange(4), 4), expected, atol=5e-5)


def test_equals_the_formula_at_large_positions():
    far = jnp.array([0, 1, 511, 5000])
    expected = [position_oracles.sinusoid(int(p), 16) for p in far]
    assert_close(positions.sinusoidal(far, 16)[:3], expected[:3], 5e-5)  # an angle of 511 has this much of rounding
    assert_close(positions.sinusoidal(far, 16), expected, 5e-4)


def test_shift_is_a_rotation():
    dim, shift = 8, 5
    table = np.asarray(positions.sinusoidal(jnp.arange(20), dim), np.float64)
    for pair in range(dim // 2):
        angle = shift / 10000 ** (2 * pair / dim)
        rotation = np.array([[np.cos(angle), np.sin(angle)], [-np.sin(angle), np.cos(angle)]])
        sin_cos = table[:, 2 * pair : 2 * pair + 2]
        np.testing.assert_allclose(sin_cos[:-shift] @ rotation.T, sin_cos[shift:], atol=1e-5)


def test_learned_looks_up_its_table():
    module = positions.Learned(tiny("decoder_lm"))
    params = init_module(module, jnp.arange(3))
    wanted = jnp.array([[2, 0, 5]])
    np.testing.assert_array_equal(module.apply({"params": params}, wanted), params["embedding"][wanted])


def test_learned_ends_at_the_maximum():
    module = positions.Learned(tiny("decoder_lm", max_length=4))
    params = init_module(module, jnp.arange(4))
    with pytest.raises(UserError, match="5 positions exceed model.max_length=4"):
        module.apply({"params": params}, jnp.arange(5))


def test_positions_beyond_the_table_give_nan():
    module = positions.Learned(tiny("decoder_lm", max_length=4))
    params = init_module(module, jnp.arange(4))
    vectors = module.apply({"params": params}, jnp.array([3, 4]))
    assert np.isfinite(vectors[0]).all()
    assert np.isnan(vectors[1]).all()


def test_none_adds_nothing():
    assert positions.make_positions(tiny("decoder_lm", position="none")) is None
