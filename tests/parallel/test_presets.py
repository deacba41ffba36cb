"""Every mesh gives the results of one device."""

import functools

import jax
import numpy as np
import pytest

from tests.helpers import rest_slow, tiny
from tformer_jax.config import Config, DataConfig, OptimConfig, ParallelConfig, TrainConfig
from tformer_jax.models import registry
from tformer_jax.parallel import rules
from tformer_jax.parallel.mesh import make_mesh
from tformer_jax.special_tokens import IGNORED
from tformer_jax.train import optimizers, state
from tformer_jax.train.step import jitted, make_train_step

STEPS = 20
PRESETS = ["fsdp+tp", "zero1", "dp", "fsdp", "tp"]
SIZES = {"dim": 16, "num_heads": 8, "ffn_dim": 16, "vocab_size": 24, "dropout": 0.1, "attention_dropout": 0.1}
MODELS = {
    "decoder_lm": tiny("decoder_lm", **SIZES, position="rotary", attention_bias=()),
    "seq2seq": tiny("seq2seq", **SIZES, source_vocab_size=20, attention_bias=()),
    "classifier": tiny("classifier", **SIZES, attention_bias=()),
    "experts": tiny("decoder_lm", **SIZES, ffn="moe", attention_bias=()),
    "latents and states": tiny(
        "decoder_lm",
        **SIZES,
        decoder_layers=2,
        layer_pattern=("full", "gated_delta"),
        attention="mla",
        position="rotary",
        mla={"latent_dim": 6, "rotary_dim": 4, "query_latent_dim": 5, "value_dim": 3},
        gated_delta={"num_key_heads": 4, "key_head_dim": 5},
    ),
    "widths that no mesh divides": tiny(
        "decoder_lm",
        **SIZES,
        decoder_layers=2,
        attention_sinks=True,
        ffn="moe",
        moe={"every": 2, "dense_dim": 13, "shared_dim": 11, "shared_gate": True},
    ),
}
DATA = {
    "seq2seq": DataConfig(source="cldr_translation", bucket_lengths=(8, 16)),
    "decoder_lm": DataConfig(source="stdlib_text", batching="windows", window=8),
    "classifier": DataConfig(source="cldr_language", bucket_lengths=(8, 16)),
}


def config(kind: str, **parallel) -> Config:
    return Config(
        model=MODELS[kind],
        data=DATA[MODELS[kind].family],
        optim=OptimConfig(schedule="constant", learning_rate=1e-3, warmup_steps=1, weight_decay=0.1, clip_norm=1.0),
        train=TrainConfig(label_smoothing=0.1, ema_decay=0.9),
        parallel=ParallelConfig(**parallel),
    )


def batch(cfg: Config, seed: int) -> dict[str, np.ndarray]:
    """Returns 8 rows of 8 tokens, padded at the end."""
    draw, family = np.random.default_rng(seed), cfg.model.model_class
    actual = {key: draw.integers(4, 20, (8, 8)).astype(np.int32) for key in family.inputs}
    if cfg.model.family == "classifier":
        return actual | {"label": draw.integers(0, 3, 8).astype(np.int32)}
    labels = draw.integers(4, 20, (8, 8)).astype(np.int32)
    labels[2:, 6:] = IGNORED
    return actual | {family.labels: labels}


def set_up(cfg: Config, devices: int = 8):
    mesh = make_mesh(cfg.parallel, jax.devices()[:devices])
    rules.check(cfg, mesh.shape)
    model = registry.build(cfg.model)
    optimizer = optimizers.build(cfg, registry.shapes(model))
    start = state.create(model, optimizer, cfg, mesh)
    return mesh, start, jitted(make_train_step(model, optimizer, cfg), start, mesh)


def trained(cfg: Config, devices: int = 8):
    mesh, current, step = set_up(cfg, devices)
    losses = []
    for number in range(STEPS):
        current, metrics = step(current, jax.device_put(batch(cfg, number), rules.batch_sharding(mesh)))
        losses.append(metrics["loss"])
    return np.array(jax.device_get(losses)), jax.device_get(current)


@functools.cache
def alone(kind: str):
    return trained(config(kind), devices=1)


def assert_as_alone(kind: str, **parallel) -> None:
    """20 steps on a mesh give the losses and parameters of one device."""
    losses, end = trained(config(kind, **parallel))
    expected_losses, expected = alone(kind)
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-5)
    for (path, actual), wanted in zip(
        jax.tree_util.tree_leaves_with_path(end.params), jax.tree.leaves(expected.params), strict=True
    ):
        scale = np.abs(wanted).max()
        np.testing.assert_allclose(actual, wanted, rtol=1e-5, atol=1e-5 * scale, err_msg=jax.tree_util.keystr(path))


@pytest.mark.slow
@pytest.mark.parametrize("preset", rest_slow(PRESETS, 1))
@pytest.mark.parametrize("kind", rest_slow(list(MODELS), 1))
def test_losses_and_parameters_of_one_device(kind, preset):
    assert_as_alone(kind, preset=preset)
