"""The train step: normalization of the loss, skipped steps, and independence of devices, padding and time."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn

from tests import oracles
from tests.helpers import assert_close, rest_slow, tiny
from tformer_jax.base import cpu
from tformer_jax.base.errors import UserError
from tformer_jax.config import Config, DataConfig, OptimConfig, ParallelConfig, TrainConfig
from tformer_jax.models import registry
from tformer_jax.models.losses import batch_loss, masked_cross_entropy
from tformer_jax.parallel import rules
from tformer_jax.parallel.mesh import data_parallelism, make_mesh
from tformer_jax.special_tokens import IGNORED, PAD
from tformer_jax.train import optimizers, state
from tformer_jax.train.step import accumulated_gradients, make_train_step


def settings(family: str = "decoder_lm", *, train: dict | None = None, optim: dict | None = None, **model) -> Config:
    """Returns a config without key biases: their gradient is zero but for rounding, which Adam would amplify."""
    return Config(
        model=tiny(family, attention_bias=(), **model),
        data=DATA[family],
        optim=OptimConfig(
            **{"schedule": "constant", "learning_rate": 1e-2, "warmup_steps": 1, "weight_decay": 0.1, **(optim or {})}
        ),
        train=TrainConfig(**{"label_smoothing": 0.1, "start_from": "not/read", **(train or {})}),
    )


def experiment(family: str = "decoder_lm", **changes):
    return built(settings(family, **changes))


@functools.cache
def built(cfg: Config):
    model = registry.build(cfg.model)
    optimizer = optimizers.build(cfg, registry.shapes(model))
    return model, optimizer, jax.jit(make_train_step(model, optimizer, cfg))


DATA = {
    "decoder_lm": DataConfig(source="stdlib_text", batching="windows", window=8),
    "seq2seq": DataConfig(source="cldr_translation", bucket_lengths=(8, 16)),
    "classifier": DataConfig(source="cldr_language", bucket_lengths=(8, 16)),
}


EXAMPLE = {"tokens": jnp.zeros((1, 4), jnp.int32)}


def batch(rows: int = 8, length: int = 6, seed: int = 0) -> dict[str, np.ndarray]:
    draw = np.random.default_rng(seed)
    tokens = draw.integers(4, 11, (rows, length + 1)).astype(np.int32)
    targets = tokens[:, 1:].copy()
    targets[draw.random(targets.shape) < 0.3] = IGNORED
    return {"tokens": tokens[:, :-1], "targets": targets}


@functools.cache
def drawn(model):
    """Returns the parameters with which `state.create` starts, compiled once for all optimizers."""
    return jax.jit(lambda: nn.unbox(registry.init(model, jax.random.key(0))))()


@functools.cache
def start(model, optimizer, *, ema: float | None = None):
    cfg = Config(model=model.cfg, data=DATA[model.cfg.family], train=TrainConfig(ema_decay=ema))
    return state.create(model, optimizer, cfg, make_mesh(ParallelConfig(data=1)), drawn(model))


@pytest.mark.long
def test_loss_is_the_mean_over_counted_labels():
    model, optimizer, step = experiment()
    initial = start(model, optimizer)
    data = batch()
    _, metrics = step(initial, data)
    logits = oracles.decoder_lm(oracles.f64(initial.params), model.cfg, data["tokens"], data["tokens"] != PAD)
    counted = data["targets"] != IGNORED
    smoothed = 0.9 * np.eye(11)[data["targets"][counted]] + 0.1 / 11
    losses = -(smoothed * np.log(oracles.softmax(logits[counted]))).sum(-1)
    assert metrics["labels"] == counted.sum()
    assert float(metrics["loss"]) == pytest.approx(losses.mean(), rel=1e-5)
    nll = -np.log(oracles.softmax(logits[counted]))[np.arange(counted.sum()), data["targets"][counted]]
    assert float(metrics["nll"]) == pytest.approx(nll.mean(), rel=1e-5)


@pytest.mark.long
@pytest.mark.parametrize("chunk", rest_slow([4, None], 1))
def test_labels_are_smoothed_over_the_tokens_of_the_tokenizer(chunk):
    """Although `model.vocab_size` is larger; the loss is that of the definition."""
    cfg, data = settings(train={"loss_chunk": chunk, "accumulate": 2}, vocab_size=14), batch()
    model = registry.build(cfg.model)
    optimizer = optimizers.build(cfg, registry.shapes(model))
    initial = start(model, optimizer)
    logits = oracles.decoder_lm(oracles.f64(initial.params), cfg.model, data["tokens"], data["tokens"] != PAD)
    counted = data["targets"] != IGNORED
    smoothed = 0.9 * np.eye(14)[data["targets"][counted]] + 0.1 / 11 * (np.arange(14) < 11)
    expected = -(smoothed * np.log(oracles.softmax(logits[counted]))).sum(-1).mean()
    step = jax.jit(make_train_step(model, optimizer, cfg, vocab_size=11))
    assert float(step(initial, data)[1]["loss"]) == pytest.approx(expected, rel=1e-5)


@pytest.mark.long
def test_frozen_parameters_do_not_count_in_the_clipping_norm():
    """A clipped SGD step has the length of the clipping norm times the learning rate, over the trainable parameters."""
    sgd = {"optimizer": "sgd", "beta1": 0.0, "weight_decay": 0.0, "clip_norm": 0.1}
    model, optimizer, step = experiment(optim=sgd | {"learning_rate_factors": ("embedding/*=0", "*bias=0")})
    initial, data = start(model, optimizer), batch()

    def loss(params):
        sums, _ = batch_loss(model, params, data, label_smoothing=0.1)
        return sums.loss / sums.labels

    grads = jax.tree_util.tree_leaves_with_path(jax.jit(jax.grad(loss))(initial.params))
    trained = [leaf for path, leaf in grads if "'embedding'" not in str(path[0]) and "bias" not in str(path[-1])]
    assert 0 < len(trained) < len(grads) - 1
    after, metrics = step(initial, data)
    assert float(metrics["grad_norm"]) == pytest.approx(float(jax.jit(optax.tree.norm)(trained)), rel=1e-5)
    moved = jax.tree.map(np.subtract, *jax.device_get((after.params, initial.params)))
    assert float(jax.jit(optax.tree.norm)(moved)) == pytest.approx(1e-2 * 0.1, rel=1e-3)
    assert not np.asarray(moved["embedding"]["embedding"]).any()


@pytest.mark.long
def test_padding_rows_and_columns_change_nothing():
    model, optimizer, step = experiment()
    data = batch()
    padded = {
        "tokens": np.pad(data["tokens"], ((0, 3), (0, 2)), constant_values=PAD),
        "targets": np.pad(data["targets"], ((0, 3), (0, 2)), constant_values=IGNORED),
    }
    plain, plain_metrics = step(start(model, optimizer), data)
    wide, wide_metrics = step(start(model, optimizer), padded)
    assert_close(wide_metrics["loss"], plain_metrics["loss"], 1e-6)
    assert_close(wide_metrics["grad_norm"], plain_metrics["grad_norm"], 1e-5)
    jax.tree.map(lambda a, b: assert_close(a, b, 1e-4), wide.params, plain.params)


@pytest.mark.slow
def test_eight_devices_equal_one():
    model, optimizer, step = experiment(dropout=0.2)
    results = []
    for devices in (1, 8):
        mesh = make_mesh(ParallelConfig(data=devices))
        assert data_parallelism(mesh) == devices
        current = state.create(model, optimizer, settings(), mesh)
        for number in range(3):
            current, metrics = step(current, jax.device_put(batch(seed=number), rules.batch_sharding(mesh)))
        results.append((jax.device_get(current.params), float(metrics["loss"])))
    assert results[0][1] == pytest.approx(results[1][1], rel=1e-5)
    jax.tree.map(lambda a, b: assert_close(a, b, 1e-5), results[1][0], results[0][0])


@pytest.mark.slow
def test_dropout_differs_from_step_to_step():
    model, optimizer, step = experiment(dropout=0.5)
    initial = start(model, optimizer)
    later = initial.replace(step=initial.step + 1)
    losses = [float(step(current, batch())[1]["loss"]) for current in (initial, initial, later)]
    assert losses[0] == losses[1] != losses[2]


def test_a_mesh_of_too_many_devices():
    with pytest.raises(UserError, match="parallel.data=9 needs 9 devices, but there are 8; use sizes"):
        make_mesh(ParallelConfig(data=9))


def pairs(rows: int = 32, seed: int = 0) -> dict[str, np.ndarray]:
    """Returns translation pairs of very different lengths."""
    draw = np.random.default_rng(seed)
    source = draw.integers(4, 11, (rows, 8)).astype(np.int32)
    target = draw.integers(4, 11, (rows, 9)).astype(np.int32)
    lengths = draw.integers(1, 9, (rows, 2))
    hidden = np.arange(8) >= lengths[:, :1], np.arange(8) >= lengths[:, 1:]
    return {
        "source": np.where(hidden[0], PAD, source),
        "target_in": np.where(hidden[1], PAD, target[:, :-1]),
        "target_out": np.where(hidden[1], IGNORED, target[:, 1:]),
    }


@pytest.mark.long
@pytest.mark.parametrize("family", rest_slow(["decoder_lm", "seq2seq"], 1))
def test_accumulation_equals_the_whole_batch(family):
    model, optimizer, whole = experiment(family)
    _, _, parts = experiment(family, train={"accumulate": 4})
    single = four = start(model, optimizer)
    for number in range(3):
        data = pairs(seed=number) if family == "seq2seq" else batch(rows=32, seed=number)
        single, metrics = whole(single, data)
        four, accumulated = parts(four, data)
        for name in metrics:
            assert_close(accumulated[name], metrics[name], 1e-6)
    proves = (f"train.accumulate=4 of {family}", "the whole batch, three steps")
    jax.tree.map(lambda a, b: assert_close(a, b, 1e-5, proves=proves), four.params, single.params)


@pytest.mark.long
@pytest.mark.parametrize("chunk", rest_slow([3, 8, 20], 1))
@pytest.mark.parametrize("tied", rest_slow(["output", "none"], 1))
def test_the_chunked_loss_equals_the_plain_one(chunk, tied):
    extra = {"z_loss": 0.01}
    model, optimizer, plain = experiment(tie_embeddings=tied, train=extra)
    _, _, chunked = experiment(tie_embeddings=tied, train={**extra, "loss_chunk": chunk})
    a = b = start(model, optimizer)
    for number in range(2):
        a, wanted = plain(a, batch(length=8, seed=number))
        b, actual = chunked(b, batch(length=8, seed=number))
        for name in wanted:
            assert_close(actual[name], wanted[name], 1e-6)
    proves = ("train.loss_chunk", "the plain loss, two steps")
    jax.tree.map(lambda x, y: assert_close(x, y, 1e-5, proves=proves), b.params, a.params)


@pytest.mark.long
def test_the_chunked_loss_never_stores_all_logits():
    model, optimizer, _ = experiment(vocab_size=97)
    cfg = settings(vocab_size=97, train={"loss_chunk": 2})
    step = make_train_step(model, optimizer, cfg)
    text = str(jax.make_jaxpr(step)(start(model, optimizer), batch(length=8)))
    assert "f32[8,2,97]" in text
    assert "f32[8,8,97]" not in text


@pytest.mark.long
def test_the_chunked_loss_sums_the_gradients_of_bfloat16_parameters_in_float32():
    """Regression test: the sum over chunks was rounded to bfloat16 after each."""
    exact = tiny("decoder_lm", decoder_layers=0, output_bias=True, tie_embeddings="none", max_length=512)
    rounded = dataclasses.replace(exact, param_dtype="bfloat16")
    data, params = (
        batch(rows=2, length=512),
        nn.unbox(registry.build(exact).init(jax.random.key(0), **EXAMPLE))["params"],
    )
    gradients = {}
    for name, cfg, chunk in (("exact", exact, None), ("plain", rounded, None), ("chunked", rounded, 2)):
        cast = jax.tree.map(lambda leaf, cfg=cfg: leaf.astype(cfg.param_dtype), params)
        loss = functools.partial(batch_loss, registry.build(cfg), batch=data, chunk=chunk)
        gradients[name] = jax.jit(jax.grad(lambda params, loss=loss: loss(params)[0].loss))(cast)["head"]
    for name in ("kernel", "bias"):
        wanted, plain, chunked = (np.float64(gradients[kind][name]) for kind in ("exact", "plain", "chunked"))
        assert np.linalg.norm(chunked - wanted) <= 1.5 * np.linalg.norm(plain - wanted)


@pytest.mark.long
def test_z_loss_is_the_mean_square_of_the_normalizer():
    model, optimizer, _ = experiment()
    cfg = settings(train={"z_loss": 0.5, "label_smoothing": 0.0}, optim={"optimizer": "sgd", "beta1": 0.0})
    initial, data = start(model, optimizer), batch()

    def objective(params):
        logits = registry.forward(model, params, data).values
        normalizer = jnp.log(jnp.exp(logits).sum(-1))
        counted = data["targets"] != IGNORED
        losses = normalizer - jnp.take_along_axis(logits, np.maximum(data["targets"], 0)[..., None], -1)[..., 0]
        return jnp.where(counted, losses + 0.5 * normalizer**2, 0).sum() / counted.sum()

    value, wanted = jax.jit(jax.value_and_grad(objective))(initial.params)
    key = jax.random.key(0)
    sums, _, grads, _ = jax.jit(lambda params: accumulated_gradients(model, params, data, key, cfg))(initial.params)
    jax.tree.map(lambda a, b: assert_close(a, b, 1e-5), grads, wanted)
    assert float(sums.loss / sums.labels) < float(value)


@pytest.mark.slow
@pytest.mark.parametrize("accumulate", rest_slow([1, 2], 1))
def test_the_auxiliary_loss_of_experts_by_hand(accumulate):
    """A router of zeros gives all experts the same probability: the balance loss is 1, the z-loss log(E)^2."""
    moe = {"num_experts": 8, "experts_per_token": 2, "balance_loss": 0.5, "router_z_loss": 0.25}
    parts = experiment(train={"accumulate": accumulate}, ffn="moe", moe=moe, decoder_layers=2)
    initial = start(*parts[:2])
    params = jax.tree_util.tree_map_with_path(
        lambda path, leaf: 0 * leaf if "router" in str(path) else leaf, initial.params
    )
    _, metrics = parts[2](dataclasses.replace(initial, params=params), batch())
    assert float(metrics["auxiliary_loss"]) == pytest.approx(2 * (0.5 + 0.25 * np.log(8) ** 2), rel=1e-6)


@pytest.mark.slow
def test_the_running_mean_by_hand():
    model, optimizer, step = experiment(train={"ema_decay": 0.5})
    current = start(model, optimizer, ema=0.9)
    mean = jax.device_get(current.params)
    for number, d in enumerate([1 / 10, 2 / 11, 3 / 12]):
        current, _ = step(current, batch(seed=number))
        mean = jax.tree.map(lambda m, p, d=d: d * m + (1 - d) * np.asarray(p), mean, current.params)
    jax.tree.map(lambda a, b: assert_close(a, b, 1e-6), current.ema, mean)
    late = step(dataclasses.replace(current, step=jnp.int32(10**6)), batch())[0]
    halfway = jax.tree.map(lambda m, p: (m + p) / 2, *jax.device_get((current.ema, late.params)))
    jax.tree.map(lambda a, b: assert_close(a, b, 1e-6), late.ema, halfway)


def poisoned(current):
    """Returns a state whose loss is NaN."""
    flat, tree = jax.tree.flatten(current.params)
    return dataclasses.replace(current, params=jax.tree.unflatten(tree, [flat[0] * jnp.nan, *flat[1:]]))


@pytest.mark.long
def test_a_non_finite_step_changes_only_the_counts():
    model, optimizer, step = experiment(train={"ema_decay": 0.5})
    current = start(model, optimizer, ema=0.9)
    bad = poisoned(current)
    after, metrics = step(bad, batch())
    assert (int(after.step), int(after.skipped), float(metrics["skipped"])) == (1, 1, 1.0)
    for name in ("params", "opt_state", "ema"):
        jax.tree.map(np.testing.assert_array_equal, getattr(after, name), getattr(bad, name))
    assert int(step(after, batch())[0].skipped) == 2
    assert int(step(dataclasses.replace(after, params=current.params), batch())[0].skipped) == 0


NORMS_AND_NOISE = {"log_norms": True, "noise_scale": True, "accumulate": 2, "label_smoothing": 0.0}


@pytest.mark.slow
def test_norms_by_layer_and_the_noise_of_the_gradient():
    model, optimizer, step = experiment(train=NORMS_AND_NOISE)
    initial, data = start(model, optimizer), batch(rows=8)
    data["targets"] = np.where(data["targets"] == IGNORED, 4, data["targets"])
    after, metrics = step(initial, data)

    @jax.jit
    @jax.grad
    def of_part(params, part):
        return masked_cross_entropy(*registry.forward(model, params, part)[:2]).loss / part["targets"].size

    def gradient(rows):
        return of_part(initial.params, {name: array[rows] for name, array in data.items()})

    def square(tree):
        return sum(float((np.float64(leaf) ** 2).sum()) for leaf in jax.tree.leaves(tree))

    whole = gradient(range(8))
    small, big = (square(gradient([0, 2, 4, 6])) + square(gradient([1, 3, 5, 7]))) / 2, square(whole)
    # appendix A.1 of "An Empirical Model of Large-Batch Training", with 24 and 48 labels
    assert float(metrics["gradient_squared"]) == pytest.approx((48 * big - 24 * small) / 24, rel=1e-4)
    assert float(metrics["gradient_variance"]) == pytest.approx((small - big) / (1 / 24 - 1 / 48), rel=1e-4)
    assert float(metrics["grad_norm/decoder/layers_0"]) == pytest.approx(
        np.sqrt(square(whole["decoder"]["layers_0"])), rel=1e-5
    )
    assert float(metrics["param_norm/embedding"]) == pytest.approx(np.sqrt(square(after.params["embedding"])), rel=1e-5)
    norms = [float(value) ** 2 for name, value in metrics.items() if name.startswith("grad_norm/")]
    assert sum(norms) == pytest.approx(big, rel=1e-5)


@pytest.mark.parametrize(
    ("flags", "options"), [("", {cpu.OPTIMIZATION_LEVEL: 1}), (f"--{cpu.OPTIMIZATION_LEVEL}=2", None)]
)
def test_initialization_is_compiled_at_level_1_unless_another_is_chosen(flags, options, monkeypatch):
    actual = []
    monkeypatch.setenv("XLA_FLAGS", flags)
    monkeypatch.setattr(
        jax, "jit", lambda *_, compiler_options, **__: actual.append(compiler_options) or (lambda: None)
    )
    cfg = settings()
    model = registry.build(cfg.model, train=True)
    optimizer = optimizers.build(cfg, registry.shapes(model))
    state.create(model, optimizer, cfg, make_mesh(ParallelConfig(data=1)))
    assert actual == [options]


@pytest.mark.parametrize("family", rest_slow(["seq2seq", "decoder_lm", "classifier"], 0))
def test_overfits_one_batch(family):
    model, optimizer, step = experiment(family, train={"label_smoothing": 0.0}, optim={"weight_decay": 0.0})
    data = {
        "seq2seq": pairs(rows=4),
        "decoder_lm": {"tokens": np.arange(4, 10)[None].astype(np.int32), "targets": np.array([[7, 5, 9, 4, 6, 8]])},
        "classifier": {"tokens": pairs(rows=6)["source"], "label": np.array([0, 1, 2, 2, 1, 0])},
    }[family]
    current = start(model, optimizer)
    for _ in range(400):
        current, metrics = step(current, data)
    assert float(metrics["loss"]) < 0.01


@pytest.mark.long
@pytest.mark.parametrize("param_dtype", rest_slow(["bfloat16", "float32"], 1))
def test_low_precision_learns_and_keeps_its_statistics_in_float32(param_dtype):
    """Parameters in bfloat16 are rounded after each step, which is computed in float32."""
    changes = {"dtype": "bfloat16", "param_dtype": param_dtype, "train": {"ema_decay": 0.9, "label_smoothing": 0.0}}
    model, optimizer, step = experiment(**changes)
    current = start(model, optimizer, ema=0.9)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(current.params)} == {param_dtype}
    data = {"tokens": np.arange(4, 10)[None].astype(np.int32), "targets": np.array([[7, 5, 9, 4, 6, 8]])}
    for _ in range(150):
        current, metrics = step(current, data)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(current.params)} == {param_dtype}
    assert {leaf.dtype.name for leaf in jax.tree.leaves((current.opt_state, current.ema))} <= {"float32", "int32"}
    assert {value.dtype.name for value in metrics.values()} == {"float32"}
    assert float(metrics["loss"]) < 0.1
