"""The pure step: what it divides by, what it leaves out, and that devices, padding and time do not matter."""

import jax
import numpy as np
import pytest

from tests import oracles
from tests.helpers import assert_close, build, tiny
from tformer_jax.config import Config, ConfigError, DataConfig, OptimConfig, ParallelConfig, TrainConfig
from tformer_jax.models import registry
from tformer_jax.parallel import rules
from tformer_jax.parallel.mesh import data_parallelism, make_mesh
from tformer_jax.special_tokens import IGNORED, PAD
from tformer_jax.train import optimizers, state
from tformer_jax.train.step import make_train_step


def experiment(family: str = "decoder_lm", **model):
    """Without key biases: their gradient is zero but for rounding, which Adam would blow up."""
    cfg = Config(
        model=tiny(family, attention_bias=(), **model),
        data={"decoder_lm": _data("stdlib_text", "windows"), "seq2seq": _data("cldr_translation", "buckets")}[family],
        optim=OptimConfig(schedule="constant", learning_rate=1e-2, warmup_steps=1, weight_decay=0.1),
        train=TrainConfig(label_smoothing=0.1),
    )
    model = registry.build(cfg.model)
    optimizer = optimizers.build(cfg)
    return model, optimizer, jax.jit(make_train_step(model, optimizer, label_smoothing=0.1, seed=0))


def _data(source: str, batching: str) -> DataConfig:
    return DataConfig(source=source, batching=batching, window=8, bucket_lengths=(8, 16))


def batch(rows: int = 8, length: int = 6, seed: int = 0) -> dict[str, np.ndarray]:
    draw = np.random.default_rng(seed)
    tokens = draw.integers(4, 11, (rows, length + 1)).astype(np.int32)
    targets = tokens[:, 1:].copy()
    targets[draw.random(targets.shape) < 0.3] = IGNORED
    return {"tokens": tokens[:, :-1], "targets": targets}


def start(model, optimizer):
    return state.create(model, optimizer, 0, make_mesh(ParallelConfig(data=1)))


def test_loss_is_the_mean_over_counted_labels():
    model, optimizer, step = experiment()
    begun = start(model, optimizer)
    data = batch()
    _, metrics = step(begun, data)
    logits = oracles.decoder_lm(oracles.f64(begun.params), model.cfg, data["tokens"], data["tokens"] != PAD)
    counted = data["targets"] != IGNORED
    smoothed = 0.9 * np.eye(11)[data["targets"][counted]] + 0.1 / 11
    losses = -(smoothed * np.log(oracles.softmax(logits[counted]))).sum(-1)
    assert metrics["labels"] == counted.sum()
    assert float(metrics["loss"]) == pytest.approx(losses.mean(), rel=1e-5)


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


def test_eight_devices_give_the_result_of_one():
    model, optimizer, step = experiment(dropout=0.2)
    results = []
    for devices in (1, 8):
        mesh = make_mesh(ParallelConfig(data=devices))
        assert data_parallelism(mesh) == devices
        current = state.create(model, optimizer, 0, mesh)
        for number in range(3):
            current, metrics = step(current, jax.device_put(batch(seed=number), rules.batch_sharding(mesh)))
        results.append((jax.device_get(current.params), float(metrics["loss"])))
    assert results[0][1] == pytest.approx(results[1][1], rel=1e-5)
    jax.tree.map(lambda a, b: assert_close(a, b, 1e-5), results[1][0], results[0][0])


def test_dropout_differs_from_step_to_step():
    model, optimizer, step = experiment(dropout=0.5)
    begun = start(model, optimizer)
    later = begun.replace(step=begun.step + 1)
    losses = [float(step(current, batch())[1]["loss"]) for current in (begun, begun, later)]
    assert losses[0] == losses[1] != losses[2]


def test_overfits_one_batch():
    model, optimizer, _ = experiment("seq2seq")
    source = np.array([[5, 6, 7, 2], [8, 9, 2, PAD]], np.int32)
    data = {
        "source": source,
        "target_in": np.array([[1, 7, 6, 5], [1, 9, 8, PAD]], np.int32),
        "target_out": np.array([[7, 6, 5, 2], [9, 8, 2, IGNORED]], np.int32),
    }
    step = jax.jit(make_train_step(model, optimizer, label_smoothing=0.0, seed=0))
    current = start(model, optimizer)
    for _ in range(150):
        current, metrics = step(current, data)
    assert float(metrics["loss"]) < 0.05


def test_a_mesh_of_too_many_devices():
    with pytest.raises(ConfigError, match=r"parallel.data=9: only 8 devices are here \(cpu\)"):
        make_mesh(ParallelConfig(data=9))


def test_weight_decay_spares_biases_and_norms():
    _, params = build(tiny("seq2seq", position="learned", output_bias=True))
    marked = optimizers.decayed(params)
    flat = {jax.tree_util.keystr(path): mark for path, mark in jax.tree_util.tree_leaves_with_path(marked)}
    for name, mark in flat.items():
        assert mark == name.endswith(("['kernel']", "['embedding']")), name
    assert {True, False} == set(flat.values())
