"""Whole models against float64 models, and the properties of each family."""

import itertools

import flax
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import oracles
from tests.helpers import assert_close, build, tiny
from tformer_jax.config import ConfigError, ModelConfig
from tformer_jax.models import registry
from tformer_jax.special_tokens import PAD

TOKENS = np.array([[5, 6, 7, 8, 9], [4, 10, 4, PAD, PAD]], np.int32)
SOURCE = np.array([[9, 8, 7, 4], [6, 5, PAD, PAD]], np.int32)
REAL = TOKENS != PAD

VARIANTS = [
    {},
    {"norm_placement": "post", "activation": "gelu", "position": "learned", "final_norm": False},
    {"norm": "rmsnorm", "activation": "silu", "position": "none", "num_kv_heads": 2, "head_dim": 3},
    {"tie_embeddings": "none", "output_bias": True, "scale_embeddings": False, "attention_bias": False},
    {"norm": "rmsnorm", "norm_placement": "post", "num_kv_heads": 1, "ffn_bias": False, "activation": "gelu_tanh"},
]


def variants(family: str) -> list[ModelConfig]:
    return [tiny(family, **changes) for changes in VARIANTS]


@pytest.mark.parametrize("cfg", variants("decoder_lm"))
def test_decoder_lm_equals_the_formulas(cfg):
    model, params = build(cfg)
    logits = model.apply({"params": params}, TOKENS, mask=REAL)
    assert logits.dtype == jnp.float32
    assert_close(logits, oracles.decoder_lm(oracles.f64(params), cfg, TOKENS, REAL))


@pytest.mark.parametrize(
    "cfg",
    [*variants("seq2seq"), tiny("seq2seq", encoder_layers=1, decoder_layers=3), tiny("seq2seq", tie_embeddings="all")],
)
def test_seq2seq_equals_the_formulas(cfg):
    model, params = build(cfg)
    logits = model.apply({"params": params}, SOURCE, TOKENS, source_mask=SOURCE != PAD, target_mask=REAL)
    expected = oracles.seq2seq(oracles.f64(params), cfg, SOURCE, TOKENS, SOURCE != PAD, REAL)
    assert_close(logits, expected)


@pytest.mark.parametrize("cfg", variants("classifier"))
def test_classifier_equals_the_formulas(cfg):
    model, params = build(cfg)
    logits = model.apply({"params": params}, TOKENS, mask=REAL)
    assert_close(logits, oracles.classifier(oracles.f64(params), cfg, TOKENS, REAL))


def test_a_text_of_padding_alone_is_finite():
    model, params = build(tiny("classifier"))
    logits = model.apply({"params": params}, np.zeros((1, 4), np.int32), mask=np.zeros((1, 4), bool))
    np.testing.assert_allclose(logits, [params["head"]["bias"]], rtol=1e-6)


@pytest.mark.parametrize("family", ["seq2seq", "classifier", "decoder_lm"])
def test_more_padding_changes_nothing(family):
    model, params = build(tiny(family))

    def logits(extra: int):
        padded = [np.pad(tokens, ((0, 0), (0, extra))) for tokens in (SOURCE, TOKENS)]
        if family == "seq2seq":
            source, target = padded
            return model.apply({"params": params}, source, target, source_mask=source != PAD, target_mask=target != PAD)
        return model.apply({"params": params}, padded[1], mask=padded[1] != PAD)

    plain, wide = logits(0), logits(3)
    if family == "classifier":
        assert_close(wide, plain, 1e-6)
    else:
        assert_close(wide[:, :5][REAL], plain[REAL], 1e-6)


def test_without_positions_the_classifier_ignores_order():
    model, params = build(tiny("classifier", position="none"))
    order = [3, 1, 4, 0, 2]
    plain, shuffled = (model.apply({"params": params}, tokens) for tokens in (TOKENS[:1], TOKENS[:1, order]))
    assert_close(shuffled, plain, 1e-6)
    model, params = build(tiny("classifier"))
    plain, shuffled = (model.apply({"params": params}, tokens) for tokens in (TOKENS[:1], TOKENS[:1, order]))
    assert np.abs(plain - shuffled).max() > 1e-3


def test_no_logit_depends_on_a_later_token():
    model, params = build(tiny("decoder_lm"))
    table = params["embedding"]["embedding"]

    def logit(table, t):
        changed = params | {"embedding": {"embedding": table}}
        return model.apply({"params": changed}, jnp.arange(4, 9)[None])[0, t, 0]

    for t in range(4):
        influence = np.abs(jax.grad(logit)(table, t)[4:9]).sum(1)
        assert (influence[t + 1 :] == 0).all()
        assert (influence[: t + 1] > 0).all()


def test_the_source_reaches_every_target_position():
    cfg = tiny("seq2seq")
    model, params = build(cfg)
    changed = SOURCE.copy()
    changed[0, 0] = 5
    before, after = (model.apply({"params": params}, source, TOKENS) for source in (SOURCE, changed))
    assert (np.abs(before[0] - after[0]).max(-1) > 1e-6).all()
    np.testing.assert_array_equal(before[1], after[1])


@pytest.mark.parametrize("site", ["dropout", "attention_dropout", "ffn_dropout"])
@pytest.mark.parametrize("family", ["seq2seq", "decoder_lm", "classifier"])
def test_each_dropout_acts_in_training_only(site, family):
    model, params = build(tiny(family, **{site: 0.5}))
    batch = registry.example_batch(model.cfg, batch_size=2, length=4)
    plain, _ = registry.forward(model, params, batch)
    again, _ = registry.forward(model, params, batch)
    dropped, _ = registry.forward(model, params, batch, train=True, dropout_key=jax.random.key(1))
    np.testing.assert_array_equal(plain, again)
    assert np.abs(plain - dropped).max() > 1e-4


def count(cfg: ModelConfig) -> int:
    shapes = jax.eval_shape(lambda: flax.linen.unbox(registry.init(registry.build(cfg), jax.random.key(0))))
    return sum(int(np.prod(leaf.shape)) for leaf in jax.tree.leaves(shapes))


def test_parameter_counts_by_hand():
    D, F, V = 8, 12, 11
    norm, attention, ffn = 2 * D, 4 * (D * D + D), 2 * D * F + F + D
    encoder_layer, decoder_layer = attention + ffn + 2 * norm, 2 * attention + ffn + 3 * norm
    assert count(tiny("decoder_lm")) == V * D + 2 * encoder_layer + norm
    assert count(tiny("decoder_lm", tie_embeddings="none", output_bias=True)) == count(tiny("decoder_lm")) + D * V + V
    assert count(tiny("decoder_lm", position="learned", max_length=7)) == count(tiny("decoder_lm")) + 7 * D
    assert count(tiny("classifier")) == V * D + 2 * encoder_layer + norm + 3 * D + 3
    both = 2 * encoder_layer + 2 * decoder_layer + 2 * norm
    assert count(tiny("seq2seq")) == 2 * V * D + both
    assert count(tiny("seq2seq", tie_embeddings="all")) == V * D + both
    assert count(tiny("seq2seq", tie_embeddings="none")) == 3 * V * D + both


def test_vaswani_2017_base_has_its_published_size():
    cfg = ModelConfig(
        vocab_size=37_000, source_vocab_size=37_000, tie_embeddings="all", norm_placement="post", final_norm=False
    )
    assert round(count(cfg) / 1e6) == 63  # table 3 says 65 million, with about 37,000 tokens


def test_initial_kernels_have_the_variance_of_their_initialiser():
    wide = {"dim": 64, "ffn_dim": 256, "vocab_size": 500, "head_dim": 16}
    for initializer, expected in (("normal", 0.02), ("xavier", np.sqrt(2 / (64 + 256)))):
        cfg = tiny("decoder_lm", initializer=initializer, **wide)
        params = flax.linen.unbox(registry.init(registry.build(cfg), jax.random.key(0)))
        kernel = params["decoder"]["layers_0"]["ffn"]["expand"]["kernel"]
        assert abs(np.std(kernel) / expected - 1) < 0.05
        assert (params["decoder"]["layers_0"]["ffn"]["expand"]["bias"] == 0).all()


def test_vocabulary_sizes_must_be_known():
    with pytest.raises(ConfigError, match="model.vocab_size=None: must be a number before a model is built"):
        registry.init(registry.build(tiny("decoder_lm", vocab_size=None)), jax.random.key(0))


def test_families_share_a_batch_format():
    for family, (rows, length) in itertools.product(registry.FAMILIES, [(1, 2), (3, 5)]):
        model, params = build(tiny(family))
        logits, labels = registry.forward(model, params, registry.example_batch(model.cfg, rows, length))
        assert logits.shape[:-1] == labels.shape
        assert registry.count_tokens(model.cfg, registry.example_batch(model.cfg, rows, length)) % (rows * length) == 0
