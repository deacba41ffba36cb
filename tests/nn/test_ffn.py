"""The feed-forward network and dropout."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from tests import oracles
from tests.helpers import apply, assert_close, init_module, normal, tiny
from tformer_jax.config import kinds
from tformer_jax.models import registry
from tformer_jax.nn.activations import gelu
from tformer_jax.nn.dropout import Dropout, dropout
from tformer_jax.nn.ffn import FFN, make_ffn


@pytest.mark.parametrize("kind", ["mlp", "gated"])
@pytest.mark.parametrize("activation", kinds.ACTIVATIONS)
@pytest.mark.parametrize("bias", [True, False])
def test_equals_the_formula(kind, activation, bias):
    module = make_ffn(tiny("decoder_lm", ffn=kind, activation=activation, ffn_bias=bias))
    x = normal(2, 3, 8)
    params = init_module(module, x)
    assert params["expand"]["kernel"].shape == (8, 12)
    assert params["contract"]["kernel"].shape == (12, 8)
    expected = oracles.ffn(oracles.f64(params), np.float64(x), module.cfg)
    proves = ([f"ffn={kind}", f"activation={activation}"], "NumPy float64")
    assert_close(apply(module, params, x), expected, 1e-6, proves=proves)


def test_gelu_and_its_derivative():
    x = np.linspace(-9, 9, 361)
    cdf = np.array([0.5 * math.erfc(-value / math.sqrt(2)) for value in x])
    density = np.exp(-x * x / 2) / math.sqrt(2 * math.pi)
    x32 = jnp.asarray(x, jnp.float32)
    assert_close(gelu(x32), x * cdf, 1e-6)
    assert_close(jax.jit(jax.vmap(jax.grad(gelu)))(x32), cdf + x * density, 1e-6)


@pytest.mark.parametrize(
    ("moe", "expected"),
    [({"every": 2}, {1, 3, 5}), ({"every": 3, "dense_layers": 3}, {5}), ({"dense_layers": 4}, {4, 5})],
)
def test_layers_that_have_experts(moe, expected):
    """Other layers have the dense FFN, of another width."""
    model = registry.build(tiny("decoder_lm", decoder_layers=6, ffn="moe", moe={**moe, "dense_dim": 7}))
    layers = nn.unbox(registry.shapes(model))["decoder"]
    actual = {number for number in range(6) if "router" in layers[f"layers_{number}"]["ffn"]}
    assert actual == expected
    dense = [layers[f"layers_{number}"]["ffn"]["expand"]["kernel"] for number in {*range(6)} - expected]
    assert {kernel.shape for kernel in dense} == {(8, 7)}


def test_inner_dropout_is_active_in_training_only():
    module = FFN(tiny("decoder_lm", ffn_dropout=0.5))
    x = normal(2, 3, 8)
    params = init_module(module, x)
    plain = apply(module, params, x)
    dropped = apply(module, params, x, train=True, rngs={"dropout": jax.random.key(0)})
    assert np.abs(plain - dropped).max() > 1e-3


def test_dropout_scales_what_it_keeps():
    x = np.ones((100, 100), np.float32)
    y = np.asarray(dropout(x, 0.25, jax.random.key(0)))
    assert set(np.unique(y)) == {np.float32(0), np.float32(1 / 0.75)}
    assert abs((y == 0).mean() - 0.25) < 0.02


def test_dropout_in_bfloat16_rounds_once():
    """Regression test: the factor 1 / 0.7 itself was rounded to bfloat16."""
    x = normal(50, 20).astype(jnp.bfloat16)
    y = np.asarray(dropout(x, 0.3, jax.random.key(0)))
    expected = (np.float64(x) / (1 - round(0.3 * 2**16) / 2**16)).astype(jnp.bfloat16)
    np.testing.assert_array_equal(y, np.where(y == 0, 0, expected))


def test_dropout_without_training_or_rate_is_the_identity():
    x = normal(3, 3)
    assert Dropout(0.5).apply({}, x, train=False) is x
    assert Dropout(0.0).apply({}, x, train=True) is x


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
def test_dropout_draws_each_element_independently(rate):
    """Within five standard deviations: the fraction dropped, and that of neighbors, which share a random word."""
    dropped = np.asarray(dropout(np.ones((1000, 401), np.float32), rate, jax.random.key(1))) == 0
    both = dropped[:, 0:400:2] & dropped[:, 1:400:2]
    for actual, share in ((dropped, rate), (both, rate**2)):
        assert abs(actual.mean() - share) < 5 * math.sqrt(share * (1 - share) / actual.size) + 2**-16


def test_dropout_with_extreme_rates():
    x = normal(40, 5)
    assert dropout(x, 1e-7, jax.random.key(0)) is x  # below the smallest rate
    assert np.isfinite(dropout(x, 1 - 1e-7, jax.random.key(0))).all()
