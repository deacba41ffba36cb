"""Models with converted parameter layouts give the same logits."""

import dataclasses

import jax
import numpy as np
import pytest

from tests.helpers import apply, assert_close, build, rest_slow, tiny
from tests.models.test_cache import SOURCE, TOKENS
from tformer_jax.models import conversions, registry
from tformer_jax.special_tokens import PAD


@pytest.mark.parametrize(
    "case", rest_slow([("seq2seq", "all"), ("decoder_lm", "output"), ("decoder_lm", "none"), ("seq2seq", "output")], 2)
)
def test_untying_the_head_changes_nothing(case):
    family, tie = case
    model, params = build(tiny(family, tie_embeddings=tie, output_bias=True, scale_output=True))
    cfg, separate = conversions.untied(model.cfg, params)
    assert cfg.tie_embeddings == {"all": "inputs"}.get(tie, "none")
    inputs = (SOURCE, TOKENS) if family == "seq2seq" else (TOKENS,)
    options = {"source_padding_mask": SOURCE != PAD} if family == "seq2seq" else {}
    expected = apply(model, params, *inputs, **options)
    assert_close(apply(registry.build(cfg), separate, *inputs, **options), expected, 1e-6)


def test_a_classifier_has_no_head_to_untie():
    """Regression test: `train.start_from` replaced the trained head by the token embeddings."""
    model, params = build(tiny("classifier", tie_embeddings="output"))
    target = dataclasses.replace(model.cfg, tie_embeddings="none")
    assert conversions.in_layout_of(target, model.cfg, params)["head"] == params["head"]


@pytest.mark.parametrize("tie", ["none", "output"])
def test_a_tied_source_embedding_is_copied_to_a_separate_one(tie):
    """Regression test: it was newly initialized."""
    model, params = build(tiny("seq2seq", tie_embeddings="all"))
    target = registry.build(dataclasses.replace(model.cfg, tie_embeddings=tie))
    copied = conversions.in_layout_of(target.cfg, model.cfg, params)
    assert_close(apply(target, copied, SOURCE, TOKENS), apply(model, params, SOURCE, TOKENS), 1e-6)
    buffers = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(copied)]
    assert len({*buffers}) == len(buffers)  # each is donated to the state of a run that starts from them


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({"num_kv_heads": 2}, "fused_qkv"),
        ({"attention_projections": "fused_kv"}, "fused_qkv"),
        pytest.param({"attention_bias": ("output",)}, "fused_qkv", marks=pytest.mark.slow),
        ({"attention_bias": ("query", "value")}, "separate"),
        ({"attention": "basic", "num_heads": 1}, "separate"),
    ],
)
@pytest.mark.parametrize("family", rest_slow(["decoder_lm", "seq2seq"], 1))
def test_projections_are_fused_where_they_can_be(family, changes, kind):
    model, params = build(tiny(family, **changes))
    cfg, together = conversions.fused(model.cfg, params)
    assert cfg.attention_projections == kind
    if kind == "separate":
        assert cfg == model.cfg
        assert together is params
        return
    inputs = (SOURCE, TOKENS) if family == "seq2seq" else (TOKENS,)
    assert_close(apply(registry.build(cfg), together, *inputs), apply(model, params, *inputs), 1e-6)


def test_a_single_self_attention_is_fused():
    model, params = build(tiny("decoder_lm", num_kv_heads=2))
    own = params["decoder"]["layers_0"]["self_attention"]
    actual = conversions.convert_projections(own, model.cfg, "fused_qkv")
    assert actual.keys() == {"qkv", "output"}
    expected = np.concatenate([own[name]["kernel"] for name in ("query", "key", "value")], axis=1)
    np.testing.assert_array_equal(actual["qkv"]["kernel"], expected)
