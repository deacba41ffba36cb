"""What models hand out on request, against NumPy float64 and against the model itself."""

import jax
import numpy as np
import pytest

from tests import oracles, position_oracles
from tests.helpers import apply, assert_close, build, rest_slow, tiny, with_settings
from tests.test_api import DATA, run_of
from tformer_jax.config import Config, DataConfig, kinds
from tformer_jax.inference.watch import rollout, watch
from tformer_jax.models import conversions, registry
from tformer_jax.nn import cached_attention, latent_attention, layers, stacks
from tformer_jax.nn.attention_ops import attention_weights
from tformer_jax.parallel.mesh import make_mesh
from tformer_jax.special_tokens import PAD
from tformer_jax.train import optimizers
from tformer_jax.train.state import abstract
from tformer_jax.train.step import jitted, make_train_step

TOKENS = np.array([[5, 6, 7, 8, 9], [4, 10, 4, PAD, PAD]], np.int32)
SOURCE = np.array([[9, 8, 7, 4], [6, 5, PAD, PAD], [PAD] * 4], np.int32)
TARGET = np.array([[1, 6, 7, 5], [1, 8, PAD, PAD], [1, 9, 4, PAD]], np.int32)
ROTARY = {"position": "rotary", "head_dim": 4}
BATCHES = {
    "decoder_lm": {"tokens": TOKENS, "targets": TOKENS},
    "classifier": {"tokens": TOKENS, "label": np.zeros(2, np.int32)},
    "seq2seq": {"source": SOURCE, "target_in": TARGET, "target_out": TARGET},
}
VARIANTS = {
    "GQA, rotary, QK-norm": {"num_kv_heads": 2, "qk_norm": True, **ROTARY},
    "windows, scanned": {"window": 2, "layer_pattern": ("window", "full"), "scan_layers": True, **ROTARY},
    "ALiBi, soft-cap, post": {"position": "alibi", "attention_softcap": 2.0, "norm_placement": "post"},
    "relative, blockwise": {"position": "relative", "attention_backend": "blockwise"},
    "both, scaled": {"norm_placement": "both", "attention_scale": 0.3, "attention_backend": "xla"},
}


def weights_of(q, k, mask, cfg, bias=None):
    """Returns the weights [B, N, T, S]: the outputs of attention whose values are the rows of the identity."""
    S, K = k.shape[1:3]
    v = np.broadcast_to(np.eye(S)[None, :, None], (len(k), S, K, S))
    return oracles.attention_core(q, k, v, mask, cfg.attention_scale, cfg.attention_softcap, bias).swapaxes(1, 2)


def queries_and_keys(p, h, memory, cfg, kind="full", position=None):
    q, k = oracles.linear(h, p["query"]), oracles.linear(memory, p["key"])
    if cfg.qk_norm:
        q, k = oracles.norm(q, p["query_norm"], cfg), oracles.norm(k, p["key_norm"], cfg)
    return (
        (position_oracles.rotate(q, cfg, kind), position_oracles.rotate(k, cfg, kind))
        if position == "rotary"
        else (q, k)
    )


def language_model(p, cfg, tokens):
    """Returns weights [B, L, N, T, T], masks [B, L, T, T], and the residual streams before each layer and the end."""
    T, stack, bias = tokens.shape[1], p["decoder"], None
    if cfg.position == "alibi":
        bias = position_oracles.alibi_bias(cfg.num_heads, T, T)
    if cfg.position == "relative":
        table = stack["attention_positions"]["embedding"]
        bias = position_oracles.relative_bias(table, T, T, cfg.relative.distance, bidirectional=False)
    x = oracles.embed(tokens, p["embedding"], p.get("input"), cfg)
    mask = oracles.causal_mask(T) & oracles.padding_mask(tokens != PAD)
    near = np.abs(np.arange(T)[:, None] - np.arange(T)) < (cfg.window or T)
    weights, masks, streams = [], [], [x]
    for number in range(cfg.decoder_layers):
        kind, single = cfg.layer_pattern[number % len(cfg.layer_pattern)], stack[f"layers_{number}"]
        post = cfg.norm_placement == "post"
        h = x if post else oracles.norm(x, single["self_attention_residual"]["norm"], cfg)
        q, k = queries_and_keys(single["self_attention"], h, h, cfg, kind, cfg.position)
        masks.append((mask & near if kind == "window" else mask)[:, 0])
        weights.append(weights_of(q, k, masks[-1][:, None], cfg, bias))
        x = oracles.layer(x, single, cfg, mask, kind=kind, bias=bias)
        streams.append(x)
    return np.stack(weights, axis=1), np.stack(masks, axis=1), streams


@pytest.mark.long
@pytest.mark.parametrize("name", rest_slow(VARIANTS.keys(), 3))
def test_a_language_model_equals_float64(name):
    """Weights, norms of the residual stream, and the predictions of the logit lens after each layer.

    Those of padding are unspecified.
    """

    def at_tokens(actual, axis=2):
        """Returns the values at the positions that are not padding; `axis` is that of the positions."""
        return np.moveaxis(np.asarray(actual), axis, 1)[TOKENS != PAD]

    model, params = build(tiny("decoder_lm", decoder_layers=3, **VARIANTS[name]))
    actual = watch(model, params, {"tokens": TOKENS})
    p = oracles.f64(conversions.convert_layers(params, model.cfg, scan_layers=False))
    weights, masks, streams = language_model(p, model.cfg, TOKENS)
    np.testing.assert_array_equal(actual.masks["decoder"], masks)
    proves = (f"attention weights: {name}", "NumPy float64")
    assert_close(at_tokens(actual.weights["decoder"], 3), at_tokens(weights, 3), proves=proves)
    norms = np.stack([np.sqrt((x**2).sum(-1)) for x in streams], axis=1)
    assert_close(at_tokens(actual.norms["decoder"][:, ::2]), at_tokens(norms), proves=proves)
    tied = p["embedding"] if model.cfg.tie_embeddings in ("output", "all") else None
    for number, x in enumerate(streams):
        last = oracles.norm(x, p["decoder"]["norm"], model.cfg) if "norm" in p["decoder"] else x
        expected = at_tokens(oracles.softmax(oracles.logits(last, p.get("head", {}), tied, model.cfg)), 1)
        ids, probabilities = (at_tokens(each[:, number], 1) for each in (actual.predictions, actual.probabilities))
        assert_close(probabilities, np.sort(expected)[..., : -ids.shape[-1] - 1 : -1], proves=proves)
        assert_close(probabilities, np.take_along_axis(expected, ids, axis=-1), proves=proves)


@pytest.mark.long
def test_a_translation_model_equals_float64():
    """The source of the last row is empty: its queries may attend to no key, and have weights of 0."""
    model, params = build(tiny("seq2seq", num_kv_heads=2))
    actual = watch(model, params, BATCHES["seq2seq"])
    p, cfg = oracles.f64(params), model.cfg
    source = oracles.embed(SOURCE, p["source_embedding"], p.get("source_input"), cfg)
    seen = oracles.padding_mask(SOURCE != PAD)
    single = p["encoder"]["layers_0"]
    h = oracles.norm(source, single["self_attention_residual"]["norm"], cfg)
    expected = weights_of(*queries_and_keys(single["self_attention"], h, h, cfg), seen, cfg)
    assert_close(actual.weights["encoder"][:, 0], expected)

    memory = oracles.stack(source, p["encoder"], cfg, 1, seen, bidirectional=True)
    x = oracles.embed(TARGET, p["target_embedding"], p.get("target_input"), cfg)
    single = p["decoder"]["layers_0"]
    mask = oracles.causal_mask(4) & oracles.padding_mask(TARGET != PAD)
    x = oracles.residual(
        x,
        single["self_attention_residual"],
        cfg,
        lambda h: oracles.attention(single["self_attention"], h, h, h, mask, cfg),
    )
    h = oracles.norm(x, single["cross_attention_residual"]["norm"], cfg)
    expected = weights_of(*queries_and_keys(single["cross_attention"], h, memory, cfg), seen, cfg)
    assert_close(
        actual.weights["cross"][:, 0], expected, proves=("attention weights: cross-attention", "NumPy float64")
    )
    assert_close(actual.norms["decoder"][:, 1], np.sqrt((x**2).sum(-1)))
    assert not actual.weights["cross"][2].any()


@pytest.mark.parametrize("family", rest_slow(BATCHES.keys(), 1))
def test_rows_sum_to_one_over_what_the_mask_allows(family):
    model, params = build(tiny(family))
    actual = watch(model, params, BATCHES[family])
    assert actual.weights.keys() == actual.masks.keys() == kinds.load(kinds.FAMILIES, family).attentions.keys()
    for name, weights in actual.weights.items():
        mask = np.array(actual.masks[name])
        assert not np.array(weights)[np.broadcast_to(~mask[:, :, None], weights.shape)].any()
        assert_close(weights.sum(axis=-1), np.broadcast_to(mask.any(axis=-1)[:, :, None], weights.shape[:-1]), 1e-6)


@pytest.mark.parametrize("family", rest_slow(BATCHES.keys(), 0))
def test_the_last_predictions_are_those_of_the_model(family):
    model, params = build(tiny(family))
    actual = watch(model, params, BATCHES[family])
    logits = np.float64(apply(model, params, **kinds.load(kinds.FAMILIES, family).arguments(BATCHES[family])))
    expected = oracles.softmax(logits).reshape(len(logits), -1, logits.shape[-1])
    assert_close(actual.probabilities[:, -1], np.sort(expected)[..., ::-1][..., : actual.predictions.shape[-1]], 1e-6)


@pytest.mark.long
def test_documents_of_a_packed_row_have_their_own_weights():
    model, params = build(tiny("decoder_lm", decoder_layers=2))
    packed = watch(model, params, {"tokens": TOKENS[:1], "segments": np.array([[1, 1, 2, 2, 2]])})
    alone = watch(model, params, {"tokens": np.array([[5, 6, PAD], [7, 8, 9]])}).weights["decoder"]
    expected = np.zeros((1, 2, 4, 5, 5))
    expected[0, :, :, :2, :2], expected[0, :, :, 2:, 2:] = alone[0, :, :, :2, :2], alone[1]
    assert_close(packed.weights["decoder"], expected)


@pytest.mark.slow
def test_a_scan_hands_out_what_a_loop_does():
    loop, params = build(tiny("seq2seq", encoder_layers=2, decoder_layers=3))
    scan, _ = build(with_settings(loop.cfg, scan_layers=True))
    stacked = conversions.convert_layers(params, loop.cfg, scan_layers=True)
    expected, actual = (watch(*each, BATCHES["seq2seq"]) for each in ((loop, params), (scan, stacked)))
    jax.tree.map(assert_close, actual, expected)


@pytest.mark.long
def test_shared_layers_hand_out_what_layers_with_equal_parameters_do():
    cfg = tiny("masked_lm", encoder_layers=3, shared_layers=True, embedding_dim=6, head_transform=True)
    model, params = build(cfg)
    copies = {f"layers_{number}": params["encoder"]["layers_0"] for number in range(3)}
    own = registry.build(with_settings(cfg, shared_layers=False))
    actual = watch(model, params, {"tokens": TOKENS})
    expected = watch(own, params | {"encoder": params["encoder"] | copies}, {"tokens": TOKENS})
    jax.tree.map(assert_close, actual, expected)
    assert not np.allclose(actual.norms["encoder"][:, 1], actual.norms["encoder"][:, 3])


@pytest.mark.long
def test_cached_decoding_hands_out_the_weights_of_the_full_pass():
    model, params = build(tiny("decoder_lm", num_kv_heads=2, **ROTARY))
    tokens = TOKENS[:1]
    full = watch(model, params, {"tokens": tokens}).weights["decoder"][:, 0]

    @jax.jit
    def step(tokens, cache):
        (_, cache), actual = model.apply({"params": params}, tokens, cache, method="decode_step", mutable=["watch"])
        (operands,) = actual["watch"]["decoder"]["layers_0"]["self_attention"]["operands"]
        return cache, attention_weights(operands)

    cache = model.apply({"params": params}, 1, 5, method="init_cache")
    for first, end in ((0, 3), (3, 4), (4, 5)):
        cache, weights = step(tokens[:, first:end], cache)
        assert_close(weights, full[:, :, first:end])


TRAINED = {
    "seq2seq": ("seq2seq", {}),
    "latent attention": ("decoder_lm", {"attention": "mla"}),
    "scanned": ("decoder_lm", {"scan_layers": True}),
    "classifier": ("classifier", {}),
}


@pytest.mark.long
@pytest.mark.parametrize("case", rest_slow(TRAINED, 1))
def test_the_train_step_is_the_same_program_as_without_hooks(case, monkeypatch):
    """XLA compiles the same text, so that hooks cost nothing when they are off."""
    family, settings = case
    cfg = Config(model=tiny(family, **settings), data=DATA[family])
    model = registry.build(cfg.model, train=True)
    mesh, optimizer = make_mesh(cfg.parallel, jax.devices()[:1]), optimizers.build(cfg, registry.shapes(model))
    state = abstract(model, optimizer, cfg, mesh)

    def program() -> str:
        return jitted(make_train_step(model, optimizer, cfg), state, mesh).lower(state, BATCHES[family]).as_text()

    assert "watch" not in jax.eval_shape(lambda: model.init(jax.random.key(0), **example(model)))
    calls, with_hooks = [], program()
    for module in (cached_attention, latent_attention, layers, stacks):
        monkeypatch.setattr(module, "watch", lambda *_, **__: calls.append(1))
    assert program() == with_hooks
    assert calls


def example(model):
    return model.cfg.model_class.arguments(registry.example_batch(model.cfg))


def test_rollout_by_hand():
    weights = np.random.default_rng(0).dirichlet(np.ones(3), size=(2, 4, 3))
    mean = [sum(weights[layer, head] for head in range(4)) / 4 for layer in range(2)]
    first, second = ([[(w[i, j] + (i == j)) / 2 for j in range(3)] for i in range(3)] for w in mean)
    product = [[sum(second[i][m] * first[m][j] for m in range(3)) for j in range(3)] for i in range(3)]
    assert_close(rollout(weights), [first, product], 1e-12)
    assert_close(rollout(weights).sum(-1), np.ones((2, 3)), 1e-12)


@pytest.mark.slow
def test_a_prefix_lm_attends_to_its_prompt_as_in_generation():
    run = run_of(Config(model=tiny("decoder_lm", prefix_lm=True), data=DATA["decoder_lm"]))
    actual, plain = run.watch([("abc", "ab"), "abcab"])
    T = actual.masks["decoder"].shape[-1]
    causal, prompt = np.tri(T, dtype=bool), np.arange(T) < T - 2
    np.testing.assert_array_equal(actual.masks["decoder"][0], causal | prompt)
    np.testing.assert_array_equal(plain.masks["decoder"][0], causal)
    assert (actual.weights["decoder"][0, :, 0, 1 : T - 2] > 0).all()
    (logits,) = run.logits([("abc", "")])
    assert run.generate(["abc"], max_new_tokens=1) == [run.tokenizers.target.decode([int(logits[-1].argmax())])]


MASKED = DataConfig(source="stdlib_text", batching="windows", window=8, objective="masked_tokens")


@pytest.mark.long
@pytest.mark.parametrize("family", rest_slow(["masked_lm", *DATA], 1))
def test_a_row_has_no_padding_and_does_not_depend_on_the_batch(family):
    run = run_of(Config(model=tiny(family), data=(DATA | {"masked_lm": MASKED})[family]))
    examples = [("abc", "cb"), ("ab", "abca")] if family == "seq2seq" else ["abca", "b"]
    together = list(run.watch(examples))
    for example, actual in zip(examples, together, strict=True):
        (alone,) = run.watch([example])
        jax.tree.map(assert_close, actual, alone)
        assert run.weight_shapes(example) == {name: weights.shape for name, weights in alone.weights.items()}
    first, lengths = together[0], {key: len(ids) for key, ids in together[0].tokens.items()}
    read = 1 if family == "classifier" else lengths["target_in" if family == "seq2seq" else "tokens"]
    assert first.predictions.shape[1] == first.probabilities.shape[1] == read
    for name, (queries, keys) in kinds.load(kinds.FAMILIES, family).attentions.items():
        assert first.weights[name].shape == (1, 4, lengths[queries], lengths[keys])
        assert first.masks[name].shape == (1, lengths[queries], lengths[keys])
