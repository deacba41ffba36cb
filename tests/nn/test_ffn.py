"""The feed-forward network and dropout."""

import jax
import numpy as np
import pytest

from tests import oracles
from tests.helpers import assert_close, init_module, normal, tiny
from tformer_jax.config import kinds
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
    assert_close(module.apply({"params": params}, x), expected, 1e-6, proves=proves)


def test_inner_dropout_is_active_in_training_only():
    module = FFN(tiny("decoder_lm", ffn_dropout=0.5))
    x = normal(2, 3, 8)
    params = init_module(module, x)
    plain = module.apply({"params": params}, x)
    dropped = module.apply({"params": params}, x, train=True, rngs={"dropout": jax.random.key(0)})
    assert np.abs(plain - dropped).max() > 1e-3


def test_dropout_scales_what_it_keeps():
    x = np.ones((100, 100), np.float32)
    y = np.asarray(dropout(x, 0.25, jax.random.key(0)))
    assert set(np.unique(y)) == {np.float32(0), np.float32(1 / 0.75)}
    assert abs((y == 0).mean() - 0.25) < 0.02


def test_dropout_without_training_or_rate_is_the_identity():
    x = normal(3, 3)
    assert Dropout(0.5).apply({}, x, train=False) is x
    assert Dropout(0.0).apply({}, x, train=True) is x
