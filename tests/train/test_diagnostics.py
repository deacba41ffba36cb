"""The name of the first value of a step that is not finite, and the noise of gradients."""

import dataclasses
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax.traverse_util import flatten_dict, unflatten_dict

from tests.helpers import build, tiny
from tformer_jax.config import Config, DataConfig, ModelConfig, OptimConfig, TrainConfig
from tformer_jax.models import registry
from tformer_jax.models.family import Family
from tformer_jax.train.non_finite import first_non_finite
from tformer_jax.train.step_metrics import noise_estimates


def config(model: ModelConfig, **train: Any) -> Config:
    data = DataConfig(source="stdlib_text", batching="windows", window=4)
    return Config(model=model, data=data, train=TrainConfig(**train))


@pytest.mark.parametrize(
    ("factor", "expected"),
    [
        (np.nan, "parameter decoder/layers_0/ffn/expand/kernel"),
        pytest.param(1e38, "output of decoder/layers_0/ffn", marks=pytest.mark.slow),
    ],
)
def test_the_first_value_that_is_not_finite_is_named(factor, expected):
    """The parameters are NumPy arrays, as the training loop passes them."""
    model, params = build(tiny("decoder_lm", decoder_layers=1, dropout=0.0))
    expand = params["decoder"]["layers_0"]["ffn"]["expand"]
    expand["kernel"] = expand["kernel"] * factor
    batch = registry.example_batch(model.cfg)
    cfg = config(model.cfg)
    assert first_non_finite(model, jax.device_get(params), batch, jax.random.key(0), cfg).startswith(expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("z_loss", "expected"), [(0.0, "sum of the squared gradients"), (3e38, "z-loss (train.z_loss)")]
)
def test_the_objective_of_the_step_is_searched(z_loss, expected):
    """With the parameters of a host, from the losses to the gradients, which are finite without z-loss."""
    model, params = build(tiny("decoder_lm", decoder_layers=1, dropout=0.0))
    batch, cfg = registry.example_batch(model.cfg), config(model.cfg, z_loss=z_loss)
    assert first_non_finite(model, jax.device_get(params), batch, jax.random.key(0), cfg) == expected


@pytest.mark.slow
def test_gradients_of_frozen_parameters_are_not_searched():
    """The gradient of `root` is infinite at 0."""
    batch = {"tokens": np.array([[5]]), "targets": np.array([[4]])}
    params = {"root": np.float32(0), "table": np.arange(121, dtype=np.float32).reshape(11, 11)}
    cfg = config(tiny("decoder_lm"))
    frozen = dataclasses.replace(cfg, optim=OptimConfig(learning_rate_factors=("root=0",)))
    names = [first_non_finite(Bigram(each.model), params, batch, jax.random.key(0), each) for each in (cfg, frozen)]
    assert names == ["gradient of root", "sum of the squared gradients"]


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{"remat": "nothing_saveable"}, {"scan_layers": True}])
def test_rematerialized_and_scanned_layers_are_searched(changes):
    model, params = build(tiny("decoder_lm", dropout=0.0, **changes))
    factors = {"expand": 1e19, "contract": 1e38}
    params = flatten_dict(params, sep="/")
    params = {name: leaf * factors.get(name.split("/")[-2], 1) for name, leaf in params.items()}
    params = unflatten_dict(params, sep="/")
    actual = first_non_finite(model, params, registry.example_batch(model.cfg), jax.random.key(0), config(model.cfg))
    assert re.fullmatch(r"output of decoder/(periods/)?layers_0/ffn/contract", actual)


class Bigram(nn.Module, Family):
    """Multiplies a table of logits by the square root of a parameter, whose gradient at 0 is infinite."""

    cfg: Any

    @nn.compact
    def __call__(self, tokens, **_):
        shapes = {"root": (), "table": (11, 11)}
        root, table = (self.param(name, nn.initializers.zeros, shape) for name, shape in shapes.items())
        return jnp.sqrt(root) * table[tokens]


@pytest.mark.long
@pytest.mark.parametrize(
    ("root", "label", "expected"),
    [
        (np.nan, 4, "parameter root"),
        (-1, 4, "output of Bigram"),
        (1, 11, "loss"),  # that of a label outside of the vocabulary is NaN
        (0, 4, "gradient of root"),
        (1, 4, "sum of the squared gradients"),
    ],
)
def test_values_are_named_in_the_order_in_which_they_are_computed(root, label, expected):
    batch = {"tokens": np.array([[5]]), "targets": np.array([[label]])}
    params = {"root": jnp.float32(root), "table": jnp.arange(121.0).reshape(11, 11)}
    cfg = config(tiny("decoder_lm"), label_smoothing=0.1)
    assert first_non_finite(Bigram(cfg.model), params, batch, jax.random.key(0), cfg) == expected


@pytest.mark.parametrize("labels", [(50, 50), (5, 95), (0, 10, 30)])
def test_the_noise_of_uneven_micro_batches_is_unbiased(labels):
    """Gradients of labels are drawn from N(mean, I): their variance is the number of parameters."""
    rng, mean, draws = np.random.default_rng(0), np.full(50, 0.3), 4000
    parts = [mean + rng.normal(size=(draws, 50)) / np.sqrt(max(count, 1)) for count in labels]
    whole = sum(count * part for count, part in zip(labels, parts, strict=True)) / sum(labels)
    norms = np.stack([np.linalg.norm(part, axis=1) * (count > 0) for count, part in zip(labels, parts, strict=True)])
    actual = jax.vmap(noise_estimates, (0, 1, None))(np.linalg.norm(whole, axis=1), norms, jnp.array(labels))
    assert actual["gradient_squared"].mean() == pytest.approx(50 * 0.3**2, rel=0.03)
    assert actual["gradient_variance"].mean() == pytest.approx(50, rel=0.03)


def test_a_single_micro_batch_with_labels_shows_no_noise():
    actual = noise_estimates(jnp.array(2.0), jnp.array([2.0, 0.0]), jnp.array([7, 0]))
    assert {name: float(value) for name, value in actual.items()} == {"gradient_squared": 0, "gradient_variance": 0}
