"""Globs of parameter names: without matches, and of parts of scanned layers and fused projections."""

import pytest

from tests.helpers import tiny
from tests.train.test_optimizers import boxed, settings
from tformer_jax.base.errors import UserError
from tformer_jax.models import registry
from tformer_jax.train import optimizers


def test_a_glob_without_matches_is_refused():
    with pytest.raises(UserError, match="'encoder/.' matches no parameter name, such as 'attention/query/bias'"):
        optimizers.build(settings(learning_rate_factors=("encoder/*=0.1",)), boxed())


@pytest.mark.parametrize("glob", ["*query/kernel", "*/k*/kernel", "*value/*"])
def test_a_glob_of_one_projection_does_not_match_fused_ones(glob):
    """Regression test: it selected the queries of cross-attention alone."""
    shapes = registry.shapes(registry.build(tiny("seq2seq", attention_projections="fused_qkv")))
    with pytest.raises(UserError, match=r"depends on the projection, but '.*/q?kv/.* holds the parameters of several"):
        optimizers.build(settings(learning_rate_factors=(f"{glob}=0.1",)), shapes)
    for whole in ("*attention/*", "*qkv/kernel", "*/kv/bias"):
        optimizers.build(settings(learning_rate_factors=(f"{whole}=0.1",)), shapes)


@pytest.mark.parametrize(
    ("optim", "sentence"),
    [
        ({"learning_rate_factors": ("*=0",)}, "learning_rate_factors=.*: freezes all parameters"),
        (
            {"learning_rate_factors": ("*query/*=0",), "decayed": ("*query/*",), "weight_decay": 0.1},
            "weight_decay=0.1: optim.decayed=.* matches no trainable parameter",
        ),
    ],
)
def test_frozen_parameters_neither_learn_nor_decay(optim, sentence):
    with pytest.raises(UserError, match=sentence):
        optimizers.build(settings(**optim), boxed())


SCANNED = tiny("decoder_lm", decoder_layers=3, scan_layers=True, layer_pattern=("full", "nope"), position="rotary")


@pytest.mark.parametrize(
    "glob",
    [
        "*layers_0/*",
        "decoder/layers_0/*",
        "decoder/layers_*",
        "*s_0/*",
        "*0/*",
        "decoder/*[0]/ffn/*",
        "*/layers_?/ffn/*",
    ],
)
def test_a_glob_of_one_layer_does_not_match_a_scan(glob):
    """Regression test: `*layers_0/*` meant all layers of the scan, and the last one, whose number was 0."""
    shapes = registry.shapes(registry.build(SCANNED))
    for optim in ({"learning_rate_factors": (f"{glob}=0.1",)}, {"decayed": (glob,), "weight_decay": 0.1}):
        with pytest.raises(
            UserError, match="depends on the layer, but 'decoder/periods/layers_./.* parameters of several"
        ):
            optimizers.build(settings(**optim), shapes)
    for exact in ("decoder/layers_2/*", "*/periods/layers_0/*", "decoder/*/kernel"):
        optimizers.build(settings(learning_rate_factors=(f"{exact}=0.1",)), shapes)
