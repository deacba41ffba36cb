"""Properties of every model: causality, independence of padding, dropout in training only, precision."""

from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.helpers import apply, assert_close, build, rest_slow, tiny, with_settings
from tformer_jax import axes
from tformer_jax.config import kinds
from tformer_jax.models import conversions, registry
from tformer_jax.models.classifier import mean_pool
from tformer_jax.special_tokens import PAD

TOKENS = np.array([[5, 6, 7, 8, 9], [4, 10, 4, PAD, PAD]], np.int32)
SOURCE = np.array([[9, 8, 7, 4], [6, 5, PAD, PAD]], np.int32)
REAL = TOKENS != PAD
FAMILIES = list(kinds.FAMILIES)


def influence(model, params, table, tokens, *arguments, **options) -> np.ndarray:
    """|d logits[t, 0] / d embedding of token j| of the first row, [T, S]; no token may be token 0, the head's row."""

    def logits(rows):
        changed = {"params": params | {table: {"embedding": rows}}}
        return model.apply(changed, *arguments, **options)[0, :, 0]

    gradient = jax.jit(jax.jacobian(logits))(params[table]["embedding"])
    return np.abs(gradient[:, tokens[0]]).sum(-1)


@pytest.mark.long
def test_logits_are_causal():
    tokens = np.array([[4, 5, 6, 7]])
    lower = np.tri(4, dtype=bool)
    model, params = build(tiny("decoder_lm"))
    np.testing.assert_array_equal(influence(model, params, "embedding", tokens, tokens) > 0, lower)
    model, params = build(tiny("seq2seq"))
    np.testing.assert_array_equal(influence(model, params, "target_embedding", tokens, SOURCE[:1], tokens) > 0, lower)


@pytest.mark.long
def test_each_real_source_token_reaches_each_target_position():
    model, params = build(tiny("seq2seq"))
    source = np.array([[9, 8, 7, 4]])
    masks = {"source_padding_mask": np.array([[True, True, True, False]])}
    reached = influence(model, params, "source_embedding", source, source, TOKENS[:1], **masks) > 0
    np.testing.assert_array_equal(reached, np.tile(masks["source_padding_mask"], (5, 1)))


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_more_padding_changes_nothing(family):
    model, params = build(tiny(family))

    def logits(extra: int):
        padded = [np.pad(tokens, ((0, 0), (0, extra)), constant_values=PAD) for tokens in (SOURCE, TOKENS)]
        if family == "seq2seq":
            source, target = padded
            return apply(
                model, params, source, target, source_padding_mask=source != PAD, target_padding_mask=target != PAD
            )
        return apply(model, params, padded[1], padding_mask=padded[1] != PAD)

    plain, wide = logits(0), logits(3)
    if family == "classifier":
        assert_close(wide, plain, 1e-6)
    else:
        assert_close(wide[:, :5][REAL], plain[REAL], 1e-6)


@pytest.mark.parametrize("family", rest_slow(sorted(FAMILIES, key=lambda family: family == "decoder_lm"), 2))
def test_rows_of_padding_have_finite_values_and_gradients(family):
    model, params = build(tiny(family))
    batch = registry.example_batch(model.cfg, 2, 4)
    batch = {name: np.concatenate([array[:1], np.zeros_like(array[:1])]) for name, array in batch.items()}

    def total(params):
        return registry.forward(model, params, batch)[0].sum()

    value, gradients = jax.jit(jax.value_and_grad(total))(params)
    assert all(np.isfinite(array).all() for array in jax.tree.leaves((value, gradients)))


def test_a_text_of_padding_gets_the_output_bias():
    model, params = build(tiny("classifier"))
    logits = apply(model, params, np.zeros((1, 4), np.int32), padding_mask=np.zeros((1, 4), bool))
    np.testing.assert_allclose(logits, [params["head"]["bias"]], rtol=1e-6)


def test_the_average_over_tokens_is_float32():
    x = jnp.ones((1, 999, 2), jnp.bfloat16)
    assert_close(mean_pool(x, np.arange(999)[None] < 777), np.ones((1, 2)), 1e-6)
    assert_close(mean_pool(x, None), np.ones((1, 2)), 1e-6)


def test_order_matters_only_through_positions():
    order = [3, 1, 4, 0, 2]
    for position, differs in (("none", False), ("learned", True)):
        model, params = build(tiny("classifier", position=position))
        plain, shuffled = apply(model, params, TOKENS[0, [range(5), order]])
        assert (np.abs(plain - shuffled).max() > 1e-3) == differs


@pytest.mark.parametrize(
    ("family", "residual", "attention", "ffn"),
    # once on each embedding and on each sub-layer, on the weights of each attention, inside each FFN
    [
        ("seq2seq", 2 + 2 * 2 + 3 * 3, 2 + 3 * 2, 2 + 3),
        ("decoder_lm", 1 + 3 * 2, 3, 3),
        ("classifier", 1 + 2 * 2, 2, 2),
    ],
)
def test_dropout_acts_everywhere_but_only_in_training(monkeypatch, family, residual, attention, ffn):
    masks = []

    def dropout(x, rate, key):
        if key is not None:
            masks.append(rate)
        return x

    for module in ("dropout", "attention_ops.reference"):
        monkeypatch.setattr(f"tformer_jax.nn.{module}.dropout", dropout)

    def rates(train):
        masks.clear()
        cfg = tiny(family, encoder_layers=2, decoder_layers=3, dropout=0.1, attention_dropout=0.2, ffn_dropout=0.3)
        model, params = build(cfg)
        batch = registry.example_batch(cfg)
        jax.eval_shape(lambda: registry.forward(model, params, batch, train=train, dropout_key=jax.random.key(0)))
        return Counter(masks)

    assert rates(train=True) == {0.1: residual, 0.2: attention, 0.3: ffn}
    assert rates(train=False) == {}


def test_dropout_follows_its_key():
    model, params = build(tiny("decoder_lm", dropout=0.5))
    batch = registry.example_batch(model.cfg, 2, 4)

    @jax.jit
    def logits(key):
        return registry.forward(model, params, batch, train=True, dropout_key=key)[0]

    first, again, other = (logits(jax.random.key(seed)) for seed in (1, 1, 2))
    np.testing.assert_array_equal(first, again)
    assert np.abs(first - other).max() > 1e-3


@pytest.mark.long
@pytest.mark.parametrize("family", rest_slow(sorted(FAMILIES, key=lambda family: family != "decoder_lm"), 1))
def test_bfloat16_computes_near_float32_with_float32_parameters_and_logits(family):
    exact, params = build(tiny(family))
    rounded, _ = build(with_settings(exact.cfg, dtype="bfloat16"))
    batch = registry.example_batch(exact.cfg, 2, 4)

    def mean(params):
        logits = registry.forward(rounded, params, batch)[0]
        return (logits**2).mean(), logits

    gradients, logits = jax.jit(jax.grad(mean, has_aux=True))(params)
    assert logits.dtype == jnp.float32
    assert {leaf.dtype for leaf in jax.tree.leaves(gradients)} == {jnp.dtype("float32")}
    expected = jax.jit(lambda params: registry.forward(exact, params, batch)[0])(params)
    assert_close(logits, expected, 2**-5)


def test_parameters_have_the_parameter_dtype():
    cfg = tiny("seq2seq", param_dtype="bfloat16", tie_embeddings="none", output_bias=True)
    shapes = registry.shapes(registry.build(cfg))
    assert {leaf.dtype for leaf in jax.tree.leaves(shapes)} == {jnp.dtype("bfloat16")}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_parameter_names_its_axes(family):
    settings = {"position": "learned", "tie_embeddings": "none", "output_bias": family != "classifier"}
    model = registry.build(tiny(family, **settings))
    boxed = jax.eval_shape(lambda: registry.init(model, jax.random.key(0)))
    known = {value for name, value in vars(axes).items() if name.isupper()} | {None}
    for leaf in jax.tree.leaves(boxed, is_leaf=lambda leaf: hasattr(leaf, "names")):
        assert len(leaf.names) == leaf.value.ndim
        assert known.issuperset(leaf.names)


@pytest.mark.slow
def test_models_convert_between_projections():
    kinds = ("separate", "fused_kv", "fused_qkv")
    models = {kind: build(tiny("seq2seq", num_kv_heads=2, head_dim=3, attention_projections=kind)) for kind in kinds}
    separate, params = models["separate"]
    converted = {kind: conversions.convert_projections(params, separate.cfg, kind) for kind in kinds}
    for kind, (model, fresh) in models.items():
        assert jax.tree.map(jnp.shape, converted[kind]) == jax.tree.map(jnp.shape, fresh)
        expected = apply(separate, params, SOURCE, TOKENS)
        assert_close(apply(model, converted[kind], SOURCE, TOKENS), expected, 1e-6)
        for other in kinds:
            back = conversions.convert_projections(converted[kind], model.cfg, other)
            jax.tree.map(np.testing.assert_array_equal, back, converted[other])


PADDED = {"left": "...xxxx", "middle": "x..xx.x", "right": "xxxx..."}
POSITIONS = {
    "sinusoidal": {},
    "learned": {"position": "learned"},
    "rotary": {"position": "rotary", "head_dim": 4},
    "ALiBi": {"position": "alibi"},
    "relative, experts": {"position": "relative", "relative": {"buckets": 8, "distance": 9}, "ffn": "moe"},
    "windows": {"layer_pattern": ("window", "full"), "window": 2, "encoder_layers": 2, "decoder_layers": 2},
}


@pytest.mark.parametrize("name", rest_slow(POSITIONS.keys(), 1))
@pytest.mark.parametrize("family", FAMILIES)
def test_padding_has_no_position(family, name):
    model, params = build(tiny(family, **POSITIONS[name]))
    alone = np.array([[5, 6, 7, 8]], np.int32)
    real = np.array([[character == "x" for character in row] for row in PADDED.values()])
    padded = np.full(real.shape, 9, np.int32)
    padded[real] = np.tile(alone[0], len(PADDED))
    if family == "classifier":
        assert_close(apply(model, params, padded, padding_mask=real), np.repeat(apply(model, params, alone), 3, axis=0))
        return
    if family != "seq2seq":
        actual, expected = apply(model, params, padded, padding_mask=real), apply(model, params, alone)
    else:
        masks = {"source_padding_mask": real[[1, 2, 0]], "target_padding_mask": real}
        actual, expected = apply(model, params, padded[[1, 2, 0]], padded, **masks), apply(model, params, alone, alone)
    for row, keep in zip(actual, real, strict=True):
        assert_close(row[keep], expected[0])
