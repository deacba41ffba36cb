"""Whole models against float64 models, their parameter counts, and the batches that the registry passes them."""

from typing import Any

import flax
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import oracles
from tests.helpers import apply, assert_close, build, rest_slow, tiny
from tformer_jax import config
from tformer_jax.base.errors import UserError
from tformer_jax.config import ModelConfig, kinds
from tformer_jax.models import registry
from tformer_jax.special_tokens import PAD

TOKENS = np.array([[5, 6, 7, 8, 9], [4, 10, 4, PAD, PAD]], np.int32)
SOURCE = np.array([[9, 8, 7, 4], [6, 5, PAD, PAD]], np.int32)
REAL = TOKENS != PAD

SIZES = ("encoder_layers", "decoder_layers", "num_heads", "head_dim", "window", "relative.buckets", "relative.distance")
WINDOWS = {"window": 2, "layer_pattern": ("window", "full"), "decoder_layers": 2, "encoder_layers": 2}
VARIANTS = [
    {},
    {"norm_placement": "post", "activation": "gelu", "position": "learned", "final_norm": False},
    {"norm": "rmsnorm", "activation": "silu", "position": "none", "num_kv_heads": 2, "head_dim": 3},
    {"tie_embeddings": "none", "output_bias": True, "scale_embeddings": False, "attention_bias": ("output",)},
    {"norm": "rmsnorm", "norm_placement": "post", "num_kv_heads": 1, "ffn_bias": False, "activation": "gelu_tanh"},
]


RELATIVE = {
    "position": "relative",
    "relative": {"buckets": 8, "distance": 9},
    "norm": "rmsnorm",
    "attention_scale": 1.0,
}
ANY_FAMILY = [
    {"attention": "basic", "num_heads": 1},
    {"position": "sinusoidal_halves", "norm_placement": "both", "norm": "rmsnorm", "norm_unit_offset": True},
    {"position": "sinusoidal_fairseq", "position_offset": 2},
    {"position": "learned", "position_offset": 2, "embedding_norm": True, "norm_placement": "post"},
    {"position": "rotary", "qk_norm": True, "num_kv_heads": 2, "head_dim": 4, "ffn": "gated", "activation": "silu"},
    {"position": "rotary", "rotary": {"pairing": "interleaved"}, "attention_softcap": 2.0, "head_dim": 4},
    {"position": "alibi", "ffn": "gated", "activation": "sigmoid", "attention_scale": 0.3},
    RELATIVE,
    RELATIVE | {"relative": RELATIVE["relative"] | {"by_layer": True}},
    {"ffn": "moe", "moe": {"num_experts": 3}, "activation": "silu", "ffn_bias": False},
]
SINKS = {"attention_sinks": True, "position": "rotary", "rotary": {"fraction": 0.5}, "head_dim": 4}
LANGUAGE_MODELS = [
    {"output_softcap": 1.5, "scale_output": True, "output_divisor": 3.0, "embedding_multiplier": 0.3},
    {
        "norm_placement": "output",
        "residual_multiplier": 0.3,
        "qk_norm": True,
        "qk_norm_over": "width",
        "position": "rotary",
        "head_dim": 4,
        "num_kv_heads": 2,
    },
    {"qk_norm": True, "qk_norm_over": "rotated_heads", "position": "rotary", "head_dim": 4, "num_kv_heads": 2},
    {**WINDOWS, "decoder_layers": 3, "position": "rotary", "rotary": {"window_base": 100.0}, "head_dim": 4},
    {**WINDOWS, "position": "alibi"},
    SINKS,
    {
        "layer_pattern": ("full", "nope"),
        "decoder_layers": 2,
        "position": "rotary",
        "head_dim": 4,
        "ffn": "moe",
        "moe": {"num_experts": 3, "every": 2, "dense_dim": 7, "shared_dim": 5, "shared_gate": True},
    },
    {
        "layer_pattern": ("nope", "full"),
        "decoder_layers": 2,
        "position": "alibi",
        "ffn": "moe",
        "moe": {"num_experts": 3, "dense_layers": 1, "shared_dim": 5},
    },
    {
        "attention": "mla",
        "mla": {"latent_dim": 6, "rotary_dim": 2},
        "layer_pattern": ("full", "nope"),
        "decoder_layers": 2,
        "position": "rotary",
    },
]
CLASSIFIERS = [
    {"pooling": "first", "pooler": True, "token_types": 2, "embedding_norm": True},
    {"pooling": "last", **WINDOWS},
    {"lookahead": 0},
    {"pooler": True, "pooler_activation": "relu"},
    {"head_transform": True, "transform_bias": False, "norm_bias": False, "transform_activation": "silu", **WINDOWS}
    | {"first_norm": False, "embedding_norm": True},
]


def variants(family: str, *more: dict[str, Any], fast: int = 99) -> list[Any]:
    without = {"output_bias": False} if family == "classifier" else {}
    cases = {named(changes): tiny(family, **changes | without) for changes in (*more, *VARIANTS, *ANY_FAMILY)}
    return rest_slow(cases, fast)


def named(changes: dict[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in changes.items()) or "defaults"


def proves(cfg: ModelConfig) -> tuple[list[str], str]:
    """Returns the entries of the table of equivalences that a whole model with these settings proves."""
    usual, actual = config.flat(tiny(cfg.family)), config.flat(cfg)
    switches = [f"{name}={actual[name]}" for name in actual if actual[name] != usual[name] and name not in SIZES]
    return [f"family={cfg.family}", *switches], "NumPy float64, whole model"


@pytest.mark.parametrize("cfg", variants("decoder_lm", *LANGUAGE_MODELS))
def test_decoder_lm_equals_the_formulas(cfg):
    model, params = build(cfg)
    logits = apply(model, params, TOKENS, padding_mask=REAL)
    assert logits.dtype == jnp.float32
    expected = oracles.decoder_lm(oracles.f64(params), cfg, TOKENS, REAL)
    assert_close(logits[REAL], expected[REAL], proves=proves(cfg))


def test_prefix_lm_equals_the_formulas():
    cfg = tiny("decoder_lm", prefix_lm=True)
    model, params = build(cfg)
    prefix = np.array([3, 2])
    logits = apply(model, params, TOKENS, padding_mask=REAL, prefix=prefix)
    expected = oracles.decoder_lm(oracles.f64(params), cfg, TOKENS, REAL, prefix)
    assert_close(logits, expected, proves=proves(cfg))
    assert np.abs(logits - apply(model, params, TOKENS, padding_mask=REAL)).max() > 1e-3


@pytest.mark.parametrize(
    "cfg",
    variants(
        "seq2seq",
        {"tie_embeddings": "all"},
        {"tie_embeddings": "inputs"},
        {"lookahead": 1},
        {**WINDOWS, "position": "alibi"},
        {"encoder_layers": 1, "decoder_layers": 3},
        SINKS,
        RELATIVE,
        fast=4,
    ),
)
def test_seq2seq_equals_the_formulas(cfg):
    model, params = build(cfg)
    logits = apply(model, params, SOURCE, TOKENS, source_padding_mask=SOURCE != PAD, target_padding_mask=REAL)
    expected = oracles.seq2seq(oracles.f64(params), cfg, SOURCE, TOKENS, SOURCE != PAD, REAL)
    assert_close(logits[REAL], expected[REAL], proves=proves(cfg))


@pytest.mark.parametrize("cfg", variants("classifier", *CLASSIFIERS, fast=3))
def test_classifier_equals_the_formulas(cfg):
    model, params = build(cfg)
    logits = apply(model, params, TOKENS, padding_mask=REAL)
    assert_close(logits, oracles.classifier(oracles.f64(params), cfg, TOKENS, REAL), proves=proves(cfg))


MASKED = [
    {"tie_embeddings": "none", "output_bias": True, "position": "rotary"},
    {"head_transform": True, "output_bias": True, "activation": "gelu", "token_types": 2, "norm_placement": "post"},
]


@pytest.mark.parametrize("cfg", [pytest.param(tiny("masked_lm", **changes), id=named(changes)) for changes in MASKED])
def test_masked_lm_equals_the_formulas(cfg):
    model, params = build(cfg)
    logits = apply(model, params, TOKENS, padding_mask=REAL)
    assert_close(logits[REAL], oracles.masked_lm(oracles.f64(params), cfg, TOKENS, REAL)[REAL], proves=proves(cfg))


def test_masked_lm_and_classifier_have_the_same_parameters_but_the_head():
    """So that fine-tuning a classifier with `train.start_from` keeps all that pre-training learned."""
    shared = {"position": "learned", "token_types": 2, "embedding_norm": True}
    pretrained, tuned = (
        flax.traverse_util.flatten_dict(registry.shapes(registry.build(tiny(family, **shared))), sep="/")
        for family in ("masked_lm", "classifier")
    )
    assert {name for name in tuned if pretrained.get(name) != tuned[name]} == {"head/bias", "head/kernel"}
    assert pretrained.keys() <= tuned.keys()


def test_narrow_embeddings_have_a_narrow_output_head():
    """Regression test: the transform had the width of the embeddings, but the untied head that of the layers."""
    sizes = {"embedding_dim": 6, "head_transform": True}
    (tied, params), (untied, separate) = (
        build(tiny("masked_lm", tie_embeddings=tie, **sizes)) for tie in ("output", "none")
    )
    table = params["embedding"]["embedding"]
    separate = flax.core.copy(params, {"head": {"kernel": table.T}})
    assert table.shape[1] == 6
    assert_close(apply(untied, separate, TOKENS), apply(tied, params, TOKENS), 1e-6)
    classifier, params = build(tiny("classifier", num_classes=3, **sizes))
    assert params["head"]["kernel"].shape == (6, 3)
    assert apply(classifier, params, TOKENS).shape == (2, 3)


def count(cfg: ModelConfig) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(registry.shapes(registry.build(cfg))))


@pytest.mark.long
def test_parameter_counts_by_hand():
    D, F, V = 8, 12, 11
    norm, attention, ffn = 2 * D, 4 * (D * D + D), 2 * D * F + F + D
    layer, cross_layer = attention + ffn + 2 * norm, 2 * attention + ffn + 3 * norm
    language_model = V * D + layer + norm
    assert count(tiny("decoder_lm")) == language_model
    assert count(tiny("decoder_lm", decoder_layers=3)) == language_model + 2 * layer
    assert count(tiny("decoder_lm", tie_embeddings="none", output_bias=True)) == language_model + D * V + V
    assert count(tiny("decoder_lm", position="learned", max_length=7)) == language_model + 7 * D
    assert count(tiny("decoder_lm", norm_placement="post")) == language_model - norm
    assert count(tiny("decoder_lm", first_norm=False, decoder_layers=2)) == language_model + layer - norm
    assert count(tiny("decoder_lm", norm="rmsnorm")) == language_model - 3 * D
    assert count(tiny("decoder_lm", attention_bias=("output",))) == language_model - 3 * D
    assert count(tiny("decoder_lm", attention_bias=("query", "key", "value"))) == language_model - D
    assert count(tiny("decoder_lm", attention_bias=("value",))) == language_model - 3 * D
    assert count(tiny("decoder_lm", ffn_bias=False)) == language_model - F - D
    assert count(tiny("decoder_lm", num_kv_heads=1)) == language_model - 2 * (D * D + D) * 3 // 4
    assert count(tiny("classifier")) == V * D + layer + norm + 3 * D + 3
    both = layer + cross_layer + 2 * norm
    assert count(tiny("seq2seq")) == 2 * V * D + both
    assert count(tiny("seq2seq", tie_embeddings="all")) == V * D + both
    assert count(tiny("seq2seq", tie_embeddings="none")) == 3 * V * D + both


def test_vaswani_2017_base_has_its_published_size():
    V, D = 37_000, 512
    cfg = ModelConfig(vocab_size=V, source_vocab_size=V, tie_embeddings="all", norm_placement="post")
    # 44,140,544 is the size of torch.nn.Transformer(), which adds a closing norm to both stacks
    assert count(cfg) == 44_140_544 - 2 * 2 * D + V * D


def test_vocabulary_sizes_must_be_known():
    with pytest.raises(UserError, match="model.vocab_size=None: must be a number before a model is built"):
        registry.init(registry.build(tiny("decoder_lm", vocab_size=None)), jax.random.key(0))


@pytest.mark.parametrize("family", kinds.FAMILIES)
def test_forward_reads_a_batch(family):
    model, params = build(tiny(family))
    batch = registry.example_batch(model.cfg, 3, 5)
    assert all(array.dtype == np.int32 and 0 <= array.min() <= array.max() < 11 for array in batch.values())
    logits, labels, _ = jax.eval_shape(lambda: registry.forward(model, params, batch))
    assert logits.shape == (*labels.shape, 3 if family == "classifier" else 11)
    assert logits.dtype == jnp.float32
    assert registry.count_tokens(model.cfg, batch) == 3 * 5 * len(kinds.load(kinds.FAMILIES, family).inputs)


@pytest.mark.long
def test_the_decoder_reads_the_shifted_target_and_never_the_labels():
    model, params = build(tiny("seq2seq"))
    batch = {"source": SOURCE, "target_in": TOKENS, "target_out": np.roll(TOKENS, -1, 1)}
    logits, labels, _ = jax.jit(lambda params: registry.forward(model, params, batch))(params)
    np.testing.assert_array_equal(labels, batch["target_out"])
    expected = apply(model, params, SOURCE, TOKENS, source_padding_mask=SOURCE != PAD, target_padding_mask=REAL)
    assert_close(logits, expected, 1e-6)


@pytest.mark.slow
def test_logits_are_not_normalized():
    model, params = build(tiny("decoder_lm"))
    assert apply(model, params, TOKENS).min() < 0
