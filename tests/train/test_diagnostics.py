"""The name of the first value of a step that is not finite."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from tests.helpers import build, tiny
from tformer_jax.models import registry
from tformer_jax.train.diagnostics import first_non_finite


@pytest.mark.parametrize(
    ("factor", "found"),
    [
        (np.nan, "parameter decoder/layers_0/ffn/expand/kernel"),
        pytest.param(1e38, "output of decoder/layers_0/ffn", marks=pytest.mark.slow),
    ],
)
def test_the_first_value_that_is_not_finite_is_named(factor, found):
    """The parameters are NumPy arrays, as the training loop passes them."""
    model, params = build(tiny("decoder_lm", decoder_layers=1, dropout=0.0))
    expand = params["decoder"]["layers_0"]["ffn"]["expand"]
    expand["kernel"] = expand["kernel"] * factor
    batch = registry.example_batch(model.cfg)
    assert first_non_finite(model, jax.device_get(params), batch, jax.random.key(0), 0.0).startswith(found)


class Bigram(nn.Module):
    """Multiplies a table of logits by the square root of a parameter, whose gradient at 0 is infinite."""

    cfg: Any

    @nn.compact
    def __call__(self, tokens, **_):
        shapes = {"root": (), "table": (11, 11)}
        root, table = (self.param(name, nn.initializers.zeros, shape) for name, shape in shapes.items())
        return jnp.sqrt(root) * table[tokens]


@pytest.mark.parametrize(
    ("root", "label", "found"),
    [
        (np.nan, 4, "parameter root"),
        (-1, 4, "output of Bigram"),
        (1, 11, "loss"),  # that of a label outside of the vocabulary is NaN
        (0, 4, "gradient of root"),
        (1, 4, "sum of the squared gradients"),
    ],
)
def test_values_are_named_in_the_order_in_which_they_are_computed(root, label, found):
    batch = {"tokens": np.array([[5]]), "targets": np.array([[label]])}
    params = {"root": jnp.float32(root), "table": jnp.arange(121.0).reshape(11, 11)}
    assert first_non_finite(Bigram(tiny("decoder_lm")), params, batch, jax.random.key(0), 0.1) == found
