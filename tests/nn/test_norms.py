"""Norms against float64 formulas."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import oracles
from tests.helpers import apply, assert_close, init_module, normal, slope, tiny
from tformer_jax.nn import norms


def test_layer_norm():
    x, scale, bias = normal(3, 5, 8), normal(8, seed=1), normal(8, seed=2)
    expected = oracles.layer_norm(*map(np.float64, (x, scale, bias)), 1e-5)
    assert_close(norms.layer_norm(x, scale, bias, 1e-5), expected, 1e-6)


def test_layer_norm_by_hand():
    x = jnp.array([1.0, 3.0])  # mean 2, variance 1
    y = norms.layer_norm(x, jnp.ones(2), jnp.zeros(2), eps=3.0)  # 1 / sqrt(1 + 3)
    np.testing.assert_allclose(y, [-0.5, 0.5], rtol=1e-6)


def test_rms_norm():
    x, scale = normal(3, 5, 8), normal(8, seed=1)
    assert_close(norms.rms_norm(x, scale, 1e-5), oracles.rms_norm(np.float64(x), np.float64(scale), 1e-5), 1e-6)


def test_rms_norm_by_hand():
    x = jnp.array([1.0, 7.0])  # mean square 25
    np.testing.assert_allclose(norms.rms_norm(x, jnp.array([1.0, 2.0]), eps=11.0), [1 / 6, 14 / 6], rtol=1e-6)


def test_the_variance_is_biased_and_eps_is_inside_the_root():
    x = normal(3, 4)
    x64, eps = np.float64(x), 0.5
    centered = x64 - x64.mean(-1, keepdims=True)
    y = norms.layer_norm(x, jnp.ones(4), None, eps)
    for mistaken in (np.sqrt(x64.var(-1, ddof=1) + eps), x64.std(-1) + eps):
        assert np.abs(y - centered / mistaken[:, None]).max() > 0.01


@pytest.mark.parametrize("eps", [1e-5, 2.0])
def test_gradients_of_layer_norm(eps):
    x, scale, bias, weights = normal(2, 3, 5), normal(5, seed=1), normal(5, seed=2), normal(2, 3, 5, seed=3)
    arguments, w = (x, scale, bias), np.float64(weights)
    gradients = jax.grad(lambda *a: (norms.layer_norm(*a, eps) * weights).sum(), argnums=(0, 1, 2))
    actual = jax.jit(gradients)(*arguments)
    for place, gradient in enumerate(actual):

        def total(value, place=place):
            given = [value if number == place else np.float64(a) for number, a in enumerate(arguments)]
            return (oracles.layer_norm(*given, eps) * w).sum()

        assert_close(
            gradient, slope(total, arguments[place]), 1e-5, proves=("norm=layernorm, gradients", "NumPy float64")
        )


@pytest.mark.parametrize("eps", [1e-5, 2.0])
def test_gradients_of_rms_norm(eps):
    x, scale, weights = normal(2, 3, 5), normal(5, seed=1), normal(2, 3, 5, seed=3)
    w, proves = np.float64(weights), ("norm=rmsnorm, gradients", "NumPy float64")
    gradients = jax.grad(lambda *a: (norms.rms_norm(*a, eps) * weights).sum(), argnums=(0, 1))
    dx, d_scale = jax.jit(gradients)(x, scale)
    assert_close(dx, slope(lambda x: (oracles.rms_norm(x, np.float64(scale), eps) * w).sum(), x), 1e-5, proves=proves)
    assert_close(d_scale, slope(lambda s: (oracles.rms_norm(np.float64(x), s, eps) * w).sum(), scale), 1e-5)


@pytest.mark.parametrize("kind", ["layernorm", "rmsnorm"])
def test_gradients_have_the_dtypes_of_their_inputs(kind):
    module, x = norms.make_norm(tiny("decoder_lm", norm=kind)), normal(2, 8).astype(jnp.bfloat16)
    params = init_module(module, x)
    total = lambda params, x: module.apply({"params": params}, x).astype(jnp.float32).sum()  # noqa: E731
    d_params, dx = jax.eval_shape(jax.grad(total, argnums=(0, 1)), params, x)
    assert (dx.dtype, d_params["scale"].dtype) == (jnp.bfloat16, jnp.float32)


@pytest.mark.parametrize("kind", ["layernorm", "rmsnorm"])
def test_statistics_are_float32_whatever_the_input(kind):
    x = (300 + normal(4, 64)).astype(jnp.bfloat16)
    cfg = tiny("decoder_lm", norm=kind, dim=64)
    module = norms.make_norm(cfg)
    params = init_module(module, x)
    y = apply(module, params, x)
    assert y.dtype == jnp.bfloat16
    expected = oracles.norm(np.asarray(x, np.float64), oracles.f64(params), cfg)
    assert_close(y, expected, 2**-8)


@pytest.mark.parametrize("kind", ["layernorm", "rmsnorm"])
def test_unit_offset(kind):
    cfg = tiny("decoder_lm", norm=kind, norm_unit_offset=True)
    module, x = norms.make_norm(cfg), normal(3, 8)
    params = init_module(module, x)
    expected = oracles.norm(np.float64(x), oracles.f64(params), cfg)
    out = apply(module, params, x)
    assert_close(out, expected, 1e-6, proves=("norm_unit_offset=True", "NumPy float64"))
    fresh = module.init(jax.random.key(0), x)["params"]
    assert not jax.tree.reduce(lambda any_so_far, leaf: any_so_far or leaf.any(), fresh, False)


def test_bias_is_optional():
    params = init_module(norms.make_norm(tiny("decoder_lm", norm_bias=False)), normal(2, 8))
    assert set(params) == {"scale"}
