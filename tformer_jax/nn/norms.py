"""Normalisation over the model width, with float32 statistics."""

import jax
import jax.numpy as jnp
from flax import linen as nn

from tformer_jax import axes
from tformer_jax.config import ModelConfig, kinds
from tformer_jax.nn.parameters import named


def layer_norm(x: jax.Array, scale: jax.Array, bias: jax.Array | None, eps: float) -> jax.Array:
    """`(x - mean) / sqrt(var + eps) * scale + bias` over the last axis ("Layer Normalization", 2016).

    `var` is the biased variance. Statistics are float32, the result has the dtype of x.
    """
    x32 = x.astype(jnp.float32)
    mean = x32.mean(-1, keepdims=True)
    centred = x32 - mean
    variance = (centred * centred).mean(-1, keepdims=True)
    y = centred * jax.lax.rsqrt(variance + eps) * scale.astype(jnp.float32)
    return (y if bias is None else y + bias.astype(jnp.float32)).astype(x.dtype)


def rms_norm(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
    """`x / sqrt(mean(x^2) + eps) * scale` over the last axis ("Root Mean Square Layer Normalization", 2019).

    The mean is float32, the result has the dtype of x.
    """
    x32 = x.astype(jnp.float32)
    mean_square = (x32 * x32).mean(-1, keepdims=True)
    return (x32 * jax.lax.rsqrt(mean_square + eps) * scale.astype(jnp.float32)).astype(x.dtype)


class Norm(nn.Module):
    """A kind of normalisation over the last axis."""

    cfg: ModelConfig
    axis: str = axes.EMBED

    def __call__(self, x: jax.Array) -> jax.Array:
        """[..., D] -> [..., D]."""
        raise NotImplementedError

    def scale(self, size: int) -> jax.Array:
        """The trained factor [size]; with `cfg.norm_unit_offset` the parameter is its distance from 1 ("Gemma")."""
        initializer = nn.initializers.zeros if self.cfg.norm_unit_offset else nn.initializers.ones
        scale = self.param("scale", named(initializer, self.axis), (size,), jnp.dtype(self.cfg.param_dtype))
        return 1 + scale.astype(jnp.float32) if self.cfg.norm_unit_offset else scale


class LayerNorm(Norm):
    """`layer_norm` with a learned scale and, where `cfg.norm_bias`, a learned shift."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """[..., D] -> [..., D]."""
        scale, bias = self.scale(x.shape[-1]), None
        if self.cfg.norm_bias:
            zeros = named(nn.initializers.zeros, self.axis)
            bias = self.param("bias", zeros, (x.shape[-1],), jnp.dtype(self.cfg.param_dtype))
        return layer_norm(x, scale, bias, self.cfg.norm_eps)


class RMSNorm(Norm):
    """`rms_norm` with a learned scale."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """[..., D] -> [..., D]."""
        return rms_norm(x, self.scale(x.shape[-1]), self.cfg.norm_eps)


def make_norm(cfg: ModelConfig, axis: str = axes.EMBED) -> Norm:
    """The norm that `cfg.norm` names, over the logical axis `axis`."""
    norm: Norm = kinds.load(kinds.NORMS, cfg.norm)(cfg, axis)
    return norm
