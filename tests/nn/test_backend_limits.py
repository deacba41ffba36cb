"""Backends refuse models and masks that they do not support, in one sentence."""

from unittest import mock

import jax
import jax.numpy as jnp
import pytest

from tests.helpers import normal, on_platform, tiny
from tformer_jax.base.errors import UserError
from tformer_jax.models import registry
from tformer_jax.nn import attention_ops
from tformer_jax.nn.masks import Mask

FOREIGN = jnp.array([[0, 0, 1, 1]]), jnp.array([[1, 0, 0, 0]])


def test_splash_refuses_masks_with_positions():
    mask, x = Mask(positions=(jnp.arange(4)[None], jnp.arange(4)[None])), normal(1, 4, 1, 2)
    with (
        on_platform("tpu"),
        pytest.raises(UserError, match="'splash' does not support caches; write one of auto, reference"),
    ):
        attention_ops.attend(x, x, x, mask, backend="splash")


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (
            {"attention_backend": "cudnn"},
            "'cudnn' needs a gpu, but this mesh is on a cpu; write one of auto, reference, xla",
        ),
        ({"attention_backend": "tokamax"}, "'tokamax' needs a gpu, but this mesh is on a cpu; write one of auto"),
        (
            {"attention_backend": "xla", "attention_dropout": 0.1},
            "'xla' cannot drop attention weights .*; write one of auto, reference, blockwise",
        ),
    ],
)
def test_unsupported_backends_are_refused_when_the_model_is_built(settings, sentence):
    with pytest.raises(UserError, match=f"model.attention_backend={sentence}"):
        registry.build(tiny("decoder_lm", **settings), train=True)


def test_dropout_is_needed_in_training_only():
    registry.build(tiny("decoder_lm", attention_backend="xla", attention_dropout=0.1))


@pytest.mark.parametrize(
    ("family", "settings", "unknown"),
    [
        ("seq2seq", {}, None),
        ("decoder_lm", {"layer_pattern": ("window", "full"), "window": 4, "decoder_layers": 2}, None),
        ("decoder_lm", {"prefix_lm": True}, "prefixes"),
        ("classifier", {"lookahead": 1}, "mask arrays"),
    ],
)
def test_the_masks_that_splash_supports(family, settings, unknown):
    cfg = tiny(family, attention_backend="splash", **settings)
    with on_platform("tpu"):
        if unknown is None:
            registry.shapes(registry.build(cfg))
            return
        with pytest.raises(UserError, match=f"'splash' does not support {unknown}"):
            registry.build(cfg)


def test_unsupported_head_sizes_are_refused():
    cfg = tiny("decoder_lm", attention_backend="cudnn", dtype="bfloat16", dim=40, num_heads=2)
    sentence = r"needs a head size that is a multiple of 8 and at most 256, not 20 \(model.head_dim\)"
    with on_platform("gpu"), pytest.raises(UserError, match=sentence):
        registry.build(cfg)


@pytest.mark.parametrize(("capability", "limit"), [("8.0", 128), ("9.0", 256)])
def test_large_heads_need_hopper(monkeypatch, capability, limit):
    monkeypatch.setattr(jax, "local_devices", lambda: [mock.Mock(compute_capability=capability)])
    cfg = tiny("decoder_lm", attention_backend="cudnn", dtype="bfloat16", dim=512, num_heads=2)
    with on_platform("gpu"):
        if limit == 256:
            registry.build(cfg)
            return
        with pytest.raises(UserError, match="at most 128, not 256 .model.head_dim.; write one of auto"):
            registry.build(cfg)


def test_an_unknown_backend_lists_the_known_ones():
    with pytest.raises(UserError, match="'flash' is not known; write one of auto, reference, xla, blockwise"):
        attention_ops.attend(*[normal(1, 4, 1, 2)] * 3, backend="flash")
