"""Small models and small comparisons that many tests need."""

import dataclasses
from typing import Any

import flax
import jax
import jax.numpy as jnp
import numpy as np

from tformer_jax.config import ModelConfig
from tformer_jax.models import registry

TINY: dict[str, Any] = {
    "dim": 8,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "num_heads": 4,
    "ffn_dim": 12,
    "vocab_size": 11,
    "max_length": 16,
    "dropout": 0.0,
}


def tiny(family: str, **changes: Any) -> ModelConfig:
    """A model of a few hundred parameters."""
    sizes = {"seq2seq": {"source_vocab_size": 11}, "classifier": {"num_classes": 3}}.get(family, {})
    return ModelConfig(**{**TINY, "family": family, **sizes, **changes})


def randomised(params: Any, seed: int = 0, scale: float = 0.5) -> Any:
    """Every parameter replaced by N(0, scale^2), so that no bias is zero and no norm is the identity."""
    leaves, tree = jax.tree.flatten(flax.linen.unbox(params))
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    return tree.unflatten([scale * jax.random.normal(key, leaf.shape) for key, leaf in zip(keys, leaves, strict=True)])


def build(cfg: ModelConfig, seed: int = 0) -> tuple[Any, Any]:
    """A model and random parameters for it."""
    model = registry.build(cfg)
    return model, randomised(registry.init(model, jax.random.key(0)), seed)


def init_module(module: Any, *arguments: Any, seed: int = 0, **options: Any) -> Any:
    """Random parameters of any module."""
    return randomised(module.init(jax.random.key(0), *arguments, **options)["params"], seed)


def normal(*shape: int, seed: int = 0) -> jax.Array:
    """N(0, 1) in float32."""
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def assert_close(actual: Any, expected: Any, tolerance: float = 1e-5) -> None:
    """The largest difference is at most `tolerance` of the largest expected value (or of 1)."""
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    assert actual.shape == expected.shape, (actual.shape, expected.shape)
    assert np.isfinite(actual).all()
    scale = max(np.abs(expected).max(initial=0), 1)
    difference = np.abs(actual - expected).max(initial=0) / scale
    assert difference <= tolerance, f"relative difference {difference:.2e} exceeds {tolerance:.0e}"


def with_settings(cfg: ModelConfig, **changes: Any) -> ModelConfig:
    """A copy of the config with some settings changed."""
    return dataclasses.replace(cfg, **changes)
