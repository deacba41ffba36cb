"""The name of the first value of a step that is not finite."""

import jax
import numpy as np
import pytest

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
